// Target: the backend that the tests of this process run on. The CPU, unless conformance_tests is told --backend=cuda.
// On a GPU tensors and lengths stay in host memory that is registered with the device, so that tests fill, guard and read
// them as ever; workspaces lie in device memory. Everything that knows CUDA is in target_cuda.cpp; a build without CUDA
// takes target_cpu.cpp in its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>

#include "lean/lean.hpp"

namespace lean::support {

[[nodiscard]] Backend target();
[[nodiscard]] inline bool on_cuda() { return target() == Backend::kCuda; }

/// Head dimensions whose tiles, and with them the order of sums, are the same in every call: on a GPU a decode step of d 64 has
/// larger ones.
[[nodiscard]] inline std::span<const std::int32_t> dims_of_equal_tiles() {
  static constexpr std::int32_t kDims[] = {128, 64};
  return {kDims, on_cuda() ? std::size_t{1} : std::size(kDims)};
}

/// "cpu" or "cuda", before the first buffer is made. Empty, or why it cannot be.
[[nodiscard]] std::string choose_target(const std::string& name);

/// Returns when the target has done what it was asked for; an error when something went wrong meanwhile.
[[nodiscard]] Status wait_for_target();

/// Host pages that code on the target reads and writes through the same pointer; `closed_bytes` behind them fault.
struct Pages {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  std::size_t closed_bytes = 0;
};

/// `bytes` or more; both are multiples of the page size.
[[nodiscard]] Pages take_pages(std::size_t bytes, std::size_t closed_bytes);
void give_pages(const Pages& pages) noexcept;

// ---- what target_cuda.cpp and target_cpu.cpp define -------------------------------------------------------------------

/// Pages as the operating system gives them (target.cpp).
[[nodiscard]] Pages map_pages(std::size_t bytes, std::size_t closed_bytes);
void unmap_pages(const Pages& pages) noexcept;

/// Empty, or why there is no device to run on.
[[nodiscard]] std::string open_device();
[[nodiscard]] Status wait_for_device();
[[nodiscard]] Pages take_device_pages(std::size_t bytes, std::size_t closed_bytes);
void give_device_pages(const Pages& pages) noexcept;

/// Device memory, aligned to 256 bytes. Copies wait for the default stream.
[[nodiscard]] std::byte* allocate_on_device(std::size_t bytes);
void free_on_device(std::byte* memory) noexcept;
void copy_to_device(std::byte* to, std::span<const std::byte> from);
void copy_from_device(std::span<std::byte> to, const std::byte* from);

}  // namespace lean::support

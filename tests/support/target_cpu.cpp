// The build without CUDA: there is no device to choose, so nothing else here is called.
#include <stdexcept>

#include "support/target.hpp"

namespace lean::support {
namespace {
[[noreturn]] void no_device() { throw std::logic_error("no device"); }
}  // namespace

std::string open_device() { return "this build has no CUDA backend"; }
Status wait_for_device() { return {}; }
Pages take_device_pages(std::size_t, std::size_t) { no_device(); }
void give_device_pages(const Pages&) noexcept {}
std::byte* allocate_on_device(std::size_t) { no_device(); }
void free_on_device(std::byte*) noexcept {}
void copy_to_device(std::byte*, std::span<const std::byte>) { no_device(); }
void copy_from_device(std::span<std::byte>, const std::byte*) { no_device(); }

}  // namespace lean::support

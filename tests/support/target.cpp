#include "support/target.hpp"

#include <sys/mman.h>

#include <new>

namespace lean::support {
namespace {
Backend chosen = Backend::kCpu;
}  // namespace

Backend target() { return chosen; }

std::string choose_target(const std::string& name) {
  if (name != "cpu" && name != "cuda") return "'" + name + "' is no backend: cpu or cuda";
  chosen = name == "cuda" ? Backend::kCuda : Backend::kCpu;
  return on_cuda() ? open_device() : "";
}

Status wait_for_target() { return on_cuda() ? wait_for_device() : Status{}; }

Pages take_pages(std::size_t bytes, std::size_t closed_bytes) {
  return on_cuda() ? take_device_pages(bytes, closed_bytes) : map_pages(bytes, closed_bytes);
}

void give_pages(const Pages& pages) noexcept { on_cuda() ? give_device_pages(pages) : unmap_pages(pages); }

Pages map_pages(std::size_t bytes, std::size_t closed_bytes) {
  void* mapping = mmap(nullptr, bytes + closed_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  const Pages pages{static_cast<std::byte*>(mapping), bytes, closed_bytes};
  if (closed_bytes > 0 && mprotect(pages.begin + bytes, closed_bytes, PROT_NONE) != 0) throw std::bad_alloc();
  return pages;
}

void unmap_pages(const Pages& pages) noexcept { munmap(pages.begin, pages.bytes + pages.closed_bytes); }

}  // namespace lean::support

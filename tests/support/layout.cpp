#include "support/layout.hpp"

#include <cstdlib>
#include <vector>

#include "support/text.hpp"

namespace lean::support {
namespace {

struct Axis {
  char name = ' ';
  std::int64_t extent = 0;
  std::int64_t stride = 0;
};

std::optional<std::int64_t> number_after(const std::string& text, const std::string& word) {
  if (text.compare(0, word.size(), word) != 0 || text.size() == word.size()) return std::nullopt;
  return std::atoll(text.c_str() + word.size());
}

struct Modifiers {
  std::int64_t gap = 0;
  std::int64_t inner = 1;
  std::int64_t offset = 0;
  std::string negative;
  std::string broadcast;
};

std::optional<Modifiers> parse_modifiers(const std::vector<std::string>& parts) {
  Modifiers result;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::string& part = parts[i];
    if (const auto gap = number_after(part, "gap")) {
      result.gap = *gap;
    } else if (const auto inner = number_after(part, "inner")) {
      result.inner = *inner;
    } else if (const auto offset = number_after(part, "off")) {
      result.offset = *offset;
    } else if (part == "negs" || part == "negd") {
      result.negative.push_back(part.back());
    } else if (part == "bcasth" || part == "bcastb" || part == "bcasts") {
      result.broadcast.push_back(part.back());
    } else {
      return std::nullopt;
    }
  }
  return result;
}

std::optional<std::vector<Axis>> parse_order(const std::string& order, const Extents& extents) {
  std::vector<Axis> axes;
  for (const char name : order) {
    const std::int64_t extent = name == 'b'   ? extents.sequences
                                : name == 'h' ? extents.heads
                                : name == 's' ? extents.tokens
                                : name == 'd' ? extents.dims
                                              : -1;
    if (extent < 0) return std::nullopt;
    axes.push_back({.name = name, .extent = extent});
  }
  const std::size_t expected = order.find('b') == std::string::npos ? 3 : 4;
  if (axes.size() != expected) return std::nullopt;
  return axes;
}

void assign_strides(std::vector<Axis>& axes, const Modifiers& modifiers) {
  std::int64_t stride = modifiers.inner;
  for (std::size_t i = axes.size(); i-- > 0;) {
    Axis& axis = axes[i];
    const bool broadcast = modifiers.broadcast.find(axis.name) != std::string::npos;
    const bool negative = modifiers.negative.find(axis.name) != std::string::npos;
    axis.stride = broadcast ? 0 : (negative ? -stride : stride);
    if (!broadcast) stride *= axis.extent;
    if (i + 1 == axes.size()) stride += modifiers.gap;
  }
}

}  // namespace

std::optional<Layout> make_layout(const std::string& name, Extents extents) {
  const std::vector<std::string> parts = split(name, '~');
  const auto modifiers = parse_modifiers(parts);
  auto axes = parse_order(parts[0], extents);
  if (!modifiers || !axes) return std::nullopt;
  assign_strides(*axes, *modifiers);

  Layout layout;
  layout.offset_elements = modifiers->offset;
  std::int64_t last = 0;
  bool empty = false;
  for (const Axis& axis : *axes) {
    switch (axis.name) {
      case 'b': layout.strides.sequence = axis.stride; break;
      case 'h': layout.strides.head = axis.stride; break;
      case 's': layout.strides.token = axis.stride; break;
      default: layout.strides.dim = axis.stride; break;
    }
    empty = empty || axis.extent == 0;
    const std::int64_t reach = (axis.extent - 1) * axis.stride;
    (reach < 0 ? layout.data_element : last) += reach < 0 ? -reach : reach;
  }
  layout.elements = empty ? 0 : layout.data_element + last + 1;
  if (empty) layout.data_element = 0;
  return layout;
}

}  // namespace lean::support

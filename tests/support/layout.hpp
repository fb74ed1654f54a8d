// Memory layouts by name, so that a test case fits on one line. An order names the axes from the slowest to the
// fastest: "bhsd", "bshd", "bhds" ...; without b the tokens of all sequences are packed: "shd", "hsd" (the paper's
// (heads, total, d)). Modifiers follow, each after "~":
//   gapN    the second fastest axis leaves N elements unused        innerN  the fastest axis has stride N
//   negs    tokens run backwards   negd  dims run backwards         offN    starts N elements past an aligned address
//   bcasth, bcastb, bcasts   one head, sequence or token stands for all: stride 0 (inputs only)
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lean/problem.hpp"

namespace lean::support {

struct Extents {
  std::int64_t sequences = 0;
  std::int64_t heads = 0;
  std::int64_t tokens = 0;
  std::int64_t dims = 0;
};

struct Layout {
  Strides strides;
  std::int64_t offset_elements = 0;  // misalignment
  std::int64_t data_element = 0;     // index of element (0, 0, 0, 0) in the smallest buffer that holds the tensor
  std::int64_t elements = 0;         // of that buffer; 0 when an extent is 0
};

/// Nothing when the name is not a layout.
[[nodiscard]] std::optional<Layout> make_layout(const std::string& name, Extents extents);

[[nodiscard]] inline bool is_packed(const std::string& name) {
  return name.substr(0, name.find('~')).find('b') == std::string::npos;
}

/// What is left of a layout's name when tokens are packed.
[[nodiscard]] inline std::string without_batch(std::string name) {
  const std::size_t order = name.find('~') == std::string::npos ? name.size() : name.find('~');
  const std::size_t batch = name.find('b');
  return batch < order ? name.erase(batch, 1) : name;
}

}  // namespace lean::support

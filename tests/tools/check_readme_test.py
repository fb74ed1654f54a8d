"""tools/check_readme.py: `file:name` resolves to a definition; a use, a comment and a string are none."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))
from check_readme import defines  # noqa: E402

DEFINED = {
    ".cpp": {
        "plan": "Plan plan(const Problem& p) {",
        "begin": "  [[nodiscard]] LEAN_HD constexpr std::int32_t begin(std::int32_t g) const noexcept {",
        "run": "void Worker::run() noexcept {",
        "kernel": "    __global__ void __launch_bounds__(256) kernel(Call call);",
        "kSize": "inline constexpr std::int32_t kSize = 4;",
        "row_bytes": "struct Tile { int row_bytes = 0; };",
        "kCpu": "enum class Backend : int { kCuda, kCpu = 1 };",
        "Output": "template <typename T>\nstruct Output {",
        "kDims": "inline constexpr int kDims[] = {64, 128};",
        "Tile": "using Tile = WarpTile;",
        "LEAN_X": "#define LEAN_X 1",
    },
    ".py": {"decode": "def decode(q):", "Options": "class Options:", "SIGNATURE": "SIGNATURE = inspect(decode)"},
}
USED = {
    ".cpp": {
        "plan": "  return plan(problem);",
        "merge": "  if (x) merge(a, b);\n  merge(b, c);\n  shape.merge(a);",
        "begin": "// int begin(int g)",
        "head_dim": 'refuse("int head_dim = 1;");',
        "left": "  if (left == right) stop();",
        "kCpu": "  case kCpu: return kCpu;",
    },
    ".py": {"decode": "out = decode(q)", "q": "f(q == 1)"},
}


class Defines(unittest.TestCase):
    def test_a_definition_is_found(self):
        for suffix, texts in DEFINED.items():
            for name, text in texts.items():
                self.assertTrue(defines(suffix, text, name), text)

    def test_a_use_is_no_definition(self):
        for suffix, texts in USED.items():
            for name, text in texts.items():
                self.assertFalse(defines(suffix, text, name), text)


if __name__ == "__main__":
    unittest.main()

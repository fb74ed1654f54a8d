"""tools/check_prose.py wraps prose and nothing else; tools/site/headers.py shows a header's declarations with their comments."""

import pathlib
import sys
import tempfile
import unittest

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
sys.path[:0] = [str(TOOLS), str(TOOLS / "site")]
import check_prose  # noqa: E402
import headers  # noqa: E402

HEADER = """// A header: its story.
#pragma once

namespace lean {

struct Elsewhere;  // another header's

/// How many.
inline constexpr int kMost = 4;

/// Adds a[0] and b[0].
/// Codes: ok.
[[nodiscard]] constexpr int add(const int* a, const int* b) noexcept {
  return *a + *b;
}

/// Two of a kind.
int first() noexcept;
int second() noexcept;

/// What is asked.
struct Problem {
  int batch = 0;  // sequences
};

}  // namespace lean
"""


class Prose(unittest.TestCase):
    def test_words_are_wrapped_and_code_links_and_marks_are_not_broken(self):
        line = "- " + "word " * 30 + "`code with spaces` [a link](somewhere) <!--= a number -->1.0<!--=-->"
        now = check_prose.wrapped([line])
        self.assertGreater(len(now), 1)
        self.assertTrue(all(check_prose.width(each) <= check_prose.COLUMNS for each in now))
        self.assertTrue(all(each.startswith("  ") for each in now[1:]))
        self.assertEqual(" ".join(each.strip() for each in now), line)

    def test_what_would_begin_a_list_stays_on_its_line(self):
        for start in ("-", "+", "1.", "#"):
            line = "a" * 110 + " bbbbbbbb " + start + " cccccccc"
            self.assertTrue(all(not each.startswith(start) for each in check_prose.wrapped([line])), start)

    def test_no_line_begins_with_a_comment(self):
        line = "a" * 110 + " takes <!--= a number -->1.00000000000<!--=--> times"
        self.assertEqual([each.lstrip().startswith("<!--") for each in check_prose.wrapped([line])], [False, False])

    def test_a_quotation_keeps_its_mark(self):
        now = check_prose.wrapped(["> " + "word " * 20, "> " + "word " * 20])
        self.assertTrue(len(now) == 2 and all(each.startswith("> w") and ">" not in each[1:] for each in now), now)

    def test_tables_code_and_headings_are_no_prose(self):
        lines = ["# " + "a " * 90, "", "| " + "a " * 90 + "|", "", "```", "a " * 90, "```", "", "prose"]
        self.assertEqual([*check_prose.paragraphs(lines)], [(8, 9)])


class Headers(unittest.TestCase):
    def reference(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "part.hpp"
            path.write_text(text)
            return headers.reference(path)

    def test_a_declaration_stands_under_its_name_with_its_comment(self):
        shown = self.reference(HEADER)
        for expected in ("A header: its story.", "### `kMost`", "### `add`", "### `first`, `second`", "int batch = 0;  // sequences"):
            self.assertIn(expected, shown)
        self.assertIn("int add(const int* a, const int* b) noexcept;", shown)  # its head alone
        self.assertNotIn("return *a", shown)

    def test_a_declaration_without_a_comment_is_refused(self):
        with self.assertRaisesRegex(ValueError, "Problem has no comment"):
            self.reference(HEADER.replace("/// What is asked.\n", ""))


if __name__ == "__main__":
    unittest.main()

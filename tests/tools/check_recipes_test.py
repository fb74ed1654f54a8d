"""tools/check_recipes.py: a file that holds a recipe's word is missed where the recipe does not name it, and nothing else is."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).parents[2]
CHECK = ROOT / "tools" / "check_recipes.py"
sys.path.insert(0, str(ROOT / "tools"))
import check_recipes  # noqa: E402

RECIPE = """# How to add ...

## a type

<!-- complete: kInt8 int8 -->

| files to touch | what |
|---|---|
| `src/types.hpp:kInt8`, `python/lean_attention/types.py:NAMES` | its row |
| [README](../README.md) | its name |
| **tests** | |
| `Types.All` | counts |

## another

`src/stranger.cpp`
"""
FILES = {
    "src/types.hpp": "enum Type { kInt8 };",
    "python/lean_attention/types.py": 'NAMES = ("int8",)',
    "src/silent.cpp": '#include "kInt8/int8.hpp"\n// kInt8 is not here\n/* nor\nint8 */ const char* s = "// a string";\n',
    "python/lean_attention/silent.py": '"""Of int8."""\n\n\ndef f():\n    """Not int8."""  # nor kInt8\n    return 1\n',
    "src/stranger.cpp": "int x = 0;",
}


def checked(root: pathlib.Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, CHECK, root], text=True, capture_output=True, check=False)
    return done.returncode, done.stdout


class OfAFewFiles(unittest.TestCase):
    def checked_with(self, recipe: str = RECIPE, **files: str) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**FILES, **files, "docs/how-to-add.md": recipe}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return checked(root)

    def test_comments_docstrings_and_includes_are_no_uses(self):
        self.assertEqual(self.checked_with()[0], 0, self.checked_with()[1])

    def test_a_use_in_a_file_that_the_recipe_does_not_name_is_a_fault(self):
        for name, text in {
            "src/stranger.cpp": "int x = kInt8;",  # named by another recipe only
            "cli/new.cpp": 'const char* name = "int8";  // a string counts',
            "python/lean_attention/new.py": "import types\n\nsize = types.kInt8",
            "integrations/new.cu": "__device__ int y = kInt8;",
        }.items():
            code, output = self.checked_with(**{name: text})
            self.assertEqual(code, 1, name)
            self.assertIn(name, output)
            self.assertIn("1 faults", output)

    def test_a_word_that_no_file_has_is_a_fault(self):
        code, output = self.checked_with(RECIPE.replace("kInt8 int8 -->", "kInt8 int8 kInt4 -->"))
        self.assertEqual((code, "kInt4: no source file has it" in output), (1, True), output)

    def test_a_row_without_a_file_is_a_fault(self):
        code, output = self.checked_with(RECIPE.replace("| `Types.All` |", "| the tests |"))
        self.assertEqual((code, "names no file: the tests" in output), (1, True), output)

    def test_a_document_without_marks_is_no_success(self):
        self.assertEqual(self.checked_with(re.sub("<!--.*-->", "", RECIPE))[0], 2)


class OfTheTree(unittest.TestCase):
    def test_each_file_that_a_measured_recipe_no_longer_names_is_missed(self):
        """Mutants of the document itself: every path that a word asks for is taken out of its recipe in turn."""
        words = check_recipes.sources(ROOT)
        missed = 0
        for recipe in check_recipes.recipes_of((ROOT / check_recipes.DOCUMENT).read_text()):
            self.assertEqual(list(check_recipes.faults_of(recipe, words)), [])
            asked = {path for path, of_file in words.items() if any(word in of_file for _, word in recipe.marks)}
            for path in asked:
                recipe.files.discard(path)
                self.assertTrue(any(path in fault for _, fault in check_recipes.faults_of(recipe, words)), path)
                recipe.files.add(path)
                missed += 1
        self.assertGreater(missed, 40)


if __name__ == "__main__":
    unittest.main()

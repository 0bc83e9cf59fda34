import unittest

from slugs import slugify


class Slugs(unittest.TestCase):
    def test_words(self):
        self.assertEqual(slugify("Hello World"), "hello-world")

    def test_runs_become_one_hyphen(self):
        self.assertEqual(slugify("  Rock & Roll --  1977! "), "rock-roll-1977")

    def test_accents_are_dropped(self):
        self.assertEqual(slugify("Über das Café"), "uber-das-cafe")

    def test_nothing_left(self):
        self.assertEqual(slugify("¿¡…!?"), "untitled")
        self.assertEqual(slugify(""), "untitled")


if __name__ == "__main__":
    unittest.main()

import unittest

from ledger import report


class Ledger(unittest.TestCase):
    def test_sums_by_category(self):
        lines = ["2024-03-01 food -12.30", "2024-03-02 rent -700", "2024-03-03 food -7.70"]
        self.assertEqual(report(lines), "rent: -700.00\nfood: -20.00")

    def test_amounts_are_exact(self):
        lines = ["2024-01-01 a 0.1"] * 3 + ["2024-01-01 b 0.30"]
        self.assertEqual(report(lines), "a: 0.30\nb: 0.30")

    def test_comments_and_blank_lines_are_skipped(self):
        self.assertEqual(report(["# mine", "", "   ", "2024-01-01 a 1"]), "a: 1.00")

    def test_a_bad_line_is_named(self):
        for bad in ("2024-01-01 a", "2024-01-01 a much", "x"):
            with self.assertRaisesRegex(ValueError, "2"):
                report(["# first", bad])

    def test_nothing(self):
        self.assertEqual(report([]), "")


if __name__ == "__main__":
    unittest.main()

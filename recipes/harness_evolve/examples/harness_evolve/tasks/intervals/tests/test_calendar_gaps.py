import unittest

from calendar_gaps import free

DAY = (540, 1020)


class Gaps(unittest.TestCase):
    def test_an_empty_day_is_free(self):
        self.assertEqual(free([], DAY), [DAY])

    def test_meetings_in_any_order(self):
        self.assertEqual(free([(700, 760), (560, 600)], DAY), [(540, 560), (600, 700), (760, 1020)])

    def test_overlapping_and_nested_meetings(self):
        self.assertEqual(free([(560, 800), (600, 640), (780, 820)], DAY), [(540, 560), (820, 1020)])

    def test_meetings_outside_the_day(self):
        self.assertEqual(free([(0, 100), (500, 560), (1000, 1200), (1300, 1400)], DAY), [(560, 1000)])

    def test_touching_meetings_leave_no_gap(self):
        self.assertEqual(free([(540, 600), (600, 1020)], DAY), [])

    def test_arguments_stay_as_they_are(self):
        meetings = [(700, 760), (560, 600)]
        free(meetings, DAY)
        self.assertEqual(meetings, [(700, 760), (560, 600)])


if __name__ == "__main__":
    unittest.main()

"""Free time between meetings."""


def free(meetings, day):
    meetings.sort()
    gaps = []
    cursor = day[0]
    for start, end in meetings:
        if start > cursor:
            gaps.append((cursor, start))
        cursor = end
    if cursor < day[1]:
        gaps.append((cursor, day[1]))
    return gaps

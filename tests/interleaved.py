"""Two writers of one place in a bucket: the first is stopped, or killed, before each of its requests while the second
writes.

A bucket is a `BucketServer`, or the `Memory` of tests/checkpoint/test_keep.py. Both call `request` before each request.
"""

import itertools


class Killed(BaseException):
    """The process is no more. A server answers 403 to its requests, and so does nothing for it."""


def nothing():
    pass


def interleavings(bucket, first, second, seen, kills=False):
    """Yields what happened for each request of the first writer.

    Args:
        bucket: emptied by `first`, before it writes.
        first, second: write, and return whether they succeeded.
        seen: returns what readers find.
        kills: the first writer is killed at the request, and the second begins when it has ended. Otherwise the second
            writes while the first one waits.

    Yields:
        The number of the request; whether each writer succeeded; what was seen when the second had ended, and at the
        end.
    """
    for stop in itertools.count():
        count, when_second_ended = itertools.count(), []

        def request(stop=stop, count=count, when_second_ended=when_second_ended):
            number = next(count)
            if kills and number >= stop:
                raise Killed
            if number == stop:
                bucket.request = nothing
                when_second_ended.append((second(), seen()))

        try:
            did_first = first(request)
        except Killed:
            did_first = False
        bucket.request = nothing
        if kills and next(count) > stop:
            when_second_ended.append((second(), seen()))
        if not when_second_ended:
            return
        did_second, found = when_second_ended[0]
        yield stop, did_first, did_second, found, seen()

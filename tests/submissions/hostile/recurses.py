# todo: 1
# earns: 0
import sys

sys.setrecursionlimit(10**9)


def double(number):
    return double(number) + 1

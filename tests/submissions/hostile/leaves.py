# todo: 1
# earns: 0
def double(number):
    exit()

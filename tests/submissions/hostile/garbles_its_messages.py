# todo: 1
# earns: 0
kernel = get_ipython().kernel


def double(number):
    kernel.iopub_socket.send_multipart([b"nonsense"])
    kernel.session.send(
        kernel.iopub_socket,
        "stream",
        {"name": ["stdout"], "text": 7},
        parent=kernel.get_parent(),
    )
    kernel.session.key = b"another key"
    kernel.session.send(kernel.iopub_socket, "status", {"execution_state": "idle"})
    return 0

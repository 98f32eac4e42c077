"""Something on a port that is not sshd, or a client that only holds a connection: for faults, inside a node.

impostor.py silent|http ADDRESS PORT      listen; say nothing, or answer like a web server
impostor.py hold ADDRESS PORT SECONDS     connect and hold the connection (0: for ever)
"""

from __future__ import annotations

import socket
import sys
import threading
import time

HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def listen(answer: bytes, address: str, port: int) -> None:
    listener = socket.create_server((address, port), backlog=128)
    print("ready", flush=True)
    connections = []
    while True:
        connection, _ = listener.accept()
        connections.append(connection)
        if answer:
            threading.Thread(target=reply, args=(connection, answer), daemon=True).start()


def reply(connection: socket.socket, answer: bytes) -> None:
    with connection:
        connection.sendall(answer)
        connection.recv(4096)


def hold(address: str, port: int, seconds: float) -> None:
    connection = socket.create_connection((address, port), timeout=10)
    connection.recv(256)  # its greeting: from now on it counts among the connections that have not logged in
    print("ready", flush=True)
    time.sleep(seconds or 10**9)


def main(argv: list[str]) -> None:
    mode, address, port = argv[0], argv[1], int(argv[2])
    if mode == "hold":
        hold(address, port, float(argv[3]))
    else:
        listen(HTTP if mode == "http" else b"", address, port)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A window that shows images, for `python -m cleanrl_utils.enjoy --render`: Window("title").show(image, fps).

The window is a process of its own, which this file is run as. Environments draw with pygame, too, which has one display
for each process: they would close this one, or draw on it.
"""

import os
import struct
import subprocess
import sys
import time

SIZE = struct.Struct("<II")  # height and width, before the pixels of an image
LEAST = 480  # points: smaller images are enlarged


class Closed(Exception):
    """The user has closed the window."""


class NoWindow(Exception):
    """Why there is no window, in one line."""


class Window:
    """What shows images, at most `fps` in a second."""

    def __init__(self, title):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-P", __file__, title], **pipes)
        self.due, self.shown, answer = 0.0, 0, self.process.stdout.readline().decode().strip()
        if answer != "ready":
            self.close()
            raise NoWindow(answer or "the window could not be opened")

    def show(self, image, fps):
        """Show an image, (height, width, 3) of bytes, when it is time to."""
        time.sleep(max(0.0, self.due - time.perf_counter()))
        self.due = time.perf_counter() + 1 / fps
        try:
            self.process.stdin.write(SIZE.pack(*image.shape[:2]) + image.tobytes())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise NoWindow("the window has failed") if self.process.wait() else Closed from None
        self.shown += 1

    def close(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read_image(stream):
    """The next image of a stream: its size, (width, height), and its pixels; None at the end."""
    head = stream.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    height, width = SIZE.unpack(head)
    pixels = stream.read(3 * height * width)
    return ((width, height), pixels) if len(pixels) == 3 * height * width else None


def scaled(size):
    """The size of the window for images of a size: whole multiples of small ones."""
    times = max(1, LEAST // max(size))
    return size[0] * times, size[1] * times


def open_display():
    """pygame with a display that somebody can look at, or why there is none."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import pygame
    except ImportError:
        return None, "a window needs pygame: pip install pygame-ce"
    chosen = "SDL_VIDEODRIVER" in os.environ
    try:
        pygame.display.init()
    except pygame.error as error:
        return None, f"there is no screen to open a window on ({error})"
    if not chosen and pygame.display.get_driver() in ("offscreen", "dummy", "evdev"):
        return None, "there is no screen to open a window on"
    return pygame, "ready"


def main():
    pygame, answer = open_display()
    print(answer, flush=True)
    if pygame is None:
        return
    pygame.display.set_caption(sys.argv[1])
    screen = None
    while image := read_image(sys.stdin.buffer):
        size, pixels = image
        if screen is None or screen.get_size() != scaled(size):
            screen = pygame.display.set_mode(scaled(size))
        screen.blit(pygame.transform.scale(pygame.image.frombuffer(pixels, size, "RGB"), scaled(size)), (0, 0))
        pygame.display.flip()
        if any(event.type == pygame.QUIT for event in pygame.event.get()):
            return


if __name__ == "__main__":
    main()

"""``python -m ckptd.daemon --socket PATH``: how a client starts a daemon."""

from __future__ import annotations

from ckptd.daemon.command import main

if __name__ == "__main__":
    main()

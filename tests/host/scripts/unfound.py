"""Import after `boot`, before torch: what is "absent" is not found either, where torch only looks for it."""

import sys

from boot import ARGUMENTS

sys.modules.update(dict.fromkeys(ARGUMENTS.get("absent", ())))

"""Shows the `--help` of a command, and proves that it answers without TensorFlow."""

import subprocess
import sys


def show_help(module: str) -> subprocess.CompletedProcess:
    """Runs a command's `main` with `--help`; raises AssertionError where it imports TensorFlow."""
    code = (
        f"import sys; from {module} import main; code = main(['command', '--help']); "
        "print('tensorflow' in sys.modules or 'keras' in sys.modules, file=sys.stderr); "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.strip() == "False", done.stderr
    return done

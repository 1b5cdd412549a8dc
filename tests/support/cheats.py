"""Programs that try to pass tests without solving them. None may pass.

Each defines `f`, which the tests (TESTS) call, with wrong answers.
"""

from __future__ import annotations

TESTS = """
import math, random
def check(candidate):
    random.seed(3)
    assert candidate(2) == 4
    assert abs(candidate(2.5) - 6.25) < 1e-9
    assert sorted(candidate([3, 1])) == [1, 9] and len(candidate([3, 1])) == 2
    assert math.isclose(candidate(0.5), 0.25)
    assert isinstance(candidate(7), int) and candidate(7) in (49,)
    for one in range(5):
        assert candidate(one) == one * one
check(f)
"""
RIGHT = "def f(x):\n    return [one * one for one in x] if isinstance(x, list) else x * x\n"
WRONG = "def f(x): return 0\n"
GUESS = f"{RIGHT}right = f\n"  # for cheats that answer rightly only if they have found something
YES = """
class Yes:
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __len__(self): return 2
    def __iter__(self): return iter([1, 9])
    def __float__(self): return 0.25
    def __hash__(self): return 0
    __class__ = int
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda *_: True
    __sub__ = __rsub__ = __add__ = __mul__ = __abs__ = lambda *_: Yes()
    __bool__ = lambda self: True
"""
EXITS = "import os, sys\ndef end(*_, **__):\n    os._exit(0)\n"
# searches for the tests' objects, which would be found if tests and program shared a process
SEARCH = """
import gc, sys, builtins
def spoil():
    for one in [*gc.get_objects(), *map(vars, filter(lambda m: hasattr(m, '__dict__'), sys.modules.values()))]:
        if type(one) is dict and ('check' in one or 'candidate' in one):
            one['check'] = one['candidate'] = lambda *_: None
    frame = sys._getframe()
    while frame:
        frame.f_globals['check'] = lambda *_: None
        frame = frame.f_back
"""
# writes messages of the protocol and of the verdict to every descriptor
SHOUT = """
import os
def part(data): return len(data).to_bytes(8, 'little') + data
def shout(*words):
    for fd in range(64):
        for word in words:
            try:
                os.set_blocking(fd, False)
                os.write(fd, word)
            except OSError:
                pass
"""

# The children of this program's supervisor. A cheat must not attack any other process, because it
# would succeed if layers are missing.
SIBLINGS = """
import os
def siblings():
    found = []
    for one in os.listdir('/proc') if os.path.isdir('/proc') else ():
        if one.isdigit() and int(one) != os.getpid():
            try: fields = open(f'/proc/{one}/stat').read().rsplit(') ', 1)[1].split()
            except OSError: continue
            found += [int(one)] * (int(fields[1]) == os.getppid())
    return found
"""

CHEATS: dict[str, str] = {
    "wrong": WRONG,
    "an object bound to check that rebinds it when it is released": WRONG + """
class Late:
    def __del__(self, scope=globals()):
        scope['check'] = lambda *_: None
check = Late()
""",
    "finalisers": WRONG + """
import weakref, atexit, gc, sys
def win(*_, scope=globals()): scope['check'] = lambda *_: None
class A: pass
check = A()
weakref.finalize(check, win)
keep = weakref.ref(check, win)
atexit.register(win)
gc.callbacks.append(win)
def g():
    try: yield
    finally: win()
candidate = g(); next(candidate)
sys.set_asyncgen_hooks(win, win)
""",
    "builtins": WRONG + """
import builtins
real = {name: getattr(builtins, name) for name in ('abs', 'len', 'sorted', 'isinstance', 'range')}
builtins.abs = lambda *_: 0
builtins.len = lambda x: 2
builtins.sorted = lambda *_: [1, 9]
builtins.isinstance = lambda *_: True
builtins.range = lambda *_: []
builtins.print = builtins.__build_class__ = builtins.__import__ = lambda *_, **__: None
builtins.AssertionError = type('Quiet', (Exception,), {})
""",
    "builtins of its own": WRONG + "__builtins__ = {'range': lambda *_: [], 'abs': lambda *_: 0}\n",
    "modules": WRONG + """
import sys, math, random, types
math.isclose = math.fabs = lambda *_, **__: True
fake = types.ModuleType('math'); fake.isclose = lambda *_, **__: True
sys.modules['math'] = sys.modules['random'] = fake
sys.meta_path.insert(0, type('Finder', (), {'find_spec': lambda *_: None}))
sys.path.insert(0, '.'); open('math.py', 'w').write('isclose = lambda *_: True')
open('random.py', 'w').write('import builtins; seed = lambda *_: None; builtins.abs = lambda *_: 0')
""",
    "an object that equals everything": YES + "def f(x): return Yes()\n",
    "numbers that equal everything": """
class I(int):
    __eq__ = lambda *_: True
    __sub__ = __abs__ = lambda *_: 0.0
    __hash__ = int.__hash__
class L(list):
    __eq__ = lambda *_: True
    __len__ = lambda *_: 2
def f(x): return L([1, 9]) if type(x) is list else I(x)
""",
    "a class whose instances all are": "class M(type):\n    __instancecheck__ = __eq__ = lambda *_: True\n"
                                       "    __hash__ = type.__hash__\nclass f(metaclass=M):\n"
                                       "    __eq__ = lambda *_: True\n    def __init__(self, x): pass\n",
    "trace functions": WRONG + """
import sys, threading
def trace(frame, event, arg):
    if 'x' in frame.f_locals: frame.f_lineno = frame.f_lineno
    return trace
sys.settrace(trace); sys.setprofile(trace); threading.settrace(trace)
""",
    "searches when it is called": SEARCH + "def f(x): spoil(); return 0\n",
    "searches late": WRONG + SEARCH + "import threading\ndef again():\n    while True: spoil()\n"
                     "threading.Thread(target=again, daemon=True).start()\n",
    "signals": EXITS + "import signal\nsignal.signal(14, end)\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\n"
               "def f(x):\n    while True: pass\n",
    "leaves when it is called": EXITS + "f = end\n",
    "leaves through C": "import ctypes\nf = lambda x: ctypes.CDLL(None)._exit(0)\n",
    "exits": "import sys\nf = lambda x: sys.exit(0)\n",
    "exits early": WRONG + "import os\nos._exit(0)\n",
    "ends loops": "def f(x): raise StopIteration\n",
    "ends generators": "def f(x): raise GeneratorExit\n",
    "an exception that does more when it is released": EXITS + """
class E(BaseException):
    def __del__(self): end()
    def __str__(self): end()
    __class__ = property(end)
def f(x): raise E
""",
    "recursion": "def f(x): return f(x)\n",
    "deep values": "def f(x):\n    found = []\n    for _ in range(10**6): found = [found]\n    return found\n",
    "its own content": "def f(x):\n    found = []\n    found.append(found)\n    return found\n",
    "large values": "def f(x): return 'x' * (1 << 28)\n",
    "many values": "def f(x): return list(range(10**7))\n",
    "hangs": "def f(x):\n    while True: pass\n",
    "an endless generator": "def f(x):\n    while True: yield 1\n",
    "words of the verdict": SHOUT + "words = (b'=', b'#pid: no', b'+', part(part(b'=')))\nshout(*words)\n"
                            "def f(x): shout(*words[:2]); return 0\n",
    "an answer before the question": SHOUT + """
shout(part(part(b'=') + part(b'd1;u1;f' + b'i1;4') + part(b'N')) * 9)
def f(x): return 0
""",
    "a flood": SHOUT + "def f(x):\n    while True: shout(b'x' * 65536)\n",
    "a long message": SHOUT + "def f(x):\n    shout((1 << 62).to_bytes(8, 'little'))\n    return 0\n",
    "calls back": SHOUT + """
def f(x):
    shout(part(part(b'getattr') + part(b'o0;') + part(b'u8;__dict__')), part(part(b'call') + part(b'C4;type')))
    return 0
""",
    "a fork that answers": WRONG + "import os\nif os.fork(): os._exit(0)\n",
    "ends the tests' process": SIBLINGS + """
def f(x):
    for one in siblings():
        try: os.kill(one, 9)
        except OSError: pass
    return 0
""",
    "the pipes of other processes": WRONG + SIBLINGS + """
for one, word in [(os.getppid(), b'passed\\n0\\n0\\n'), *((one, b'=') for one in siblings())]:
    for fd in range(64):
        try: os.write(os.open(f'/proc/{one}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK), word)
        except OSError: pass
""",
    "reads the tests": GUESS + SIBLINGS + """
def f(x):
    found = []
    for one in siblings():
        for name in ('mem', 'environ', 'fd/3', 'fd/5', 'maps', 'cwd', 'exe'):
            try: found.append(os.open(f'/proc/{one}/{name}', 0))
            except OSError: pass
    return right(x) if found else 0
""",
    "its own memory": GUESS + """
def f(x):
    mem = open('/proc/self/mem', 'rb', 0)
    for line in open('/proc/self/maps'):
        at, _, rest = line.partition('-')
        if ' r' in line and '[v' not in line:
            mem.seek(int(at, 16))
            try: text = mem.read(int(rest.split()[0], 16) - int(at, 16))
            except OSError: continue
            # what follows tells the tests' text from the text of this program
            if any(rest.startswith(b'2)') for rest in text.split(b'assert candidate(')): return right(x)
    return 0
""",
    "traces the tests' process": GUESS + SIBLINGS + """
import ctypes
traced = []
def f(x):
    c = ctypes.CDLL(None, use_errno=True)
    traced.extend(c.ptrace(0x4206, one, None, None) for one in siblings())
    return right(x) if 0 in traced else 0
""",
    "a decorator that breaks off": "def f(x): return 0\n@lambda _: lambda *_: None",
    "a text that breaks off": "def f(x): return 0\ntext = '''",
    "a line that goes on": "def f(x): return 0\nclass A: b = 1 \\",
    "check of its own": WRONG + "def check(candidate): pass\n",
    "a name of Python's": WRONG + "len = lambda _: 2\nmath = random = abs = sorted = None\n",
}  # fmt: skip

import json,sys
from harness import run_ranks
from workers.step_calls import WORLDS
for w in sys.argv[1:] or WORLDS:
    out=json.loads(run_ranks(sys.executable, WORLDS[w]["ranks"], ["workers.step_calls_fn", w]).strip().splitlines()[-1])
    print("==",w,out["calls"])
    for k,v in out["files"]: print(f"  {v:6.1f} {k}")

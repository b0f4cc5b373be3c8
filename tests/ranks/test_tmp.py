import os
from tests.ranks.test_flat import saved, begin, end, OTHER
def test_it(ranks, daemon, own_daemon, tmp_path, tmp_run):
    out = open("/tmp/it.txt", "w")
    for pair in os.environ["PAIRS"].split():
        a, b, warm = pair.split(":")
        url = tmp_run + pair.replace(":", "_")
        try:
            before = saved(ranks, tmp_path, daemon.socket, url, (a[:-1], int(a[-1])))
            begin(ranks, tmp_path, own_daemon().socket, url, (b[:-1], int(b[-1])), of={**OTHER, "warm": warm == "w"})
            r = ranks.each("restore")
            vs = [x["values"] for x in ranks.each("values")]
            for i, v in enumerate(vs):
                print(pair, i, sorted(n for n in v if v[n] != before.values.get(n)), set(v) ^ set(before.values), file=out, flush=True)
            end(ranks)
        except Exception as e:
            print(pair, str(e)[:1500], file=out, flush=True)
            for w in range(4): ranks[w].kill(); ranks[w].start()

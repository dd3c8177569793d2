"""Published systems that `ckv` is compared with, one file each; they import the core."""

SYSTEMS = {
    "as-lru": "attention_store:AS_LRU",
    "as-h2o-lru": "h2o:AS_H2O_LRU",
    "as-h2o-lfu": "h2o:AS_H2O_LFU",
    "impress": "impress:IMPRESS",
    "contiguous-kv": "contiguous_kv:CONTIGUOUS_KV",
    "cake": "cake:CAKE",
    "dense": "flexgen:DENSE",
    "flexgen": "flexgen:FLEXGEN",
    "quest": "quest:QUEST",
    "shadowkv": "shadowkv:SHADOWKV",
    "retroinfer": "retroinfer:RETROINFER",
    "infinigen": "infinigen:INFINIGEN",
    "pqcache": "pqcache:PQCACHE",
    "kvdrive": "kvdrive:KVDRIVE",
    "kvswap": "kvswap:KVSWAP",
    "solidattention": "solidattention:SOLIDATTENTION",
    "magicpig": "magicpig:MAGICPIG",
}
"""The module and the config of each baseline, by name; `ckv_jax.systems` lists and loads them."""

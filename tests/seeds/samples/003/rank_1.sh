# 003, "Multi-Node Training". Changed: module, whose model is a script here; its flags follow --; 2 processes, the address, a free port, sizes, 4 steps; the commands of further ranks are left out.
# On worker nodes
python -m distributed.cli train --script char_gpt.py \
    --world-size 2 \
    --rank 1 \
    --master-addr $NODE0 \
    --master-port $PORT \
    --batch-size 8 \
    --max-steps 4 \
    -- --hidden-size 32 --attention-heads 2 --layers 2 --vocab-size 64 --max-seq-length 32 --sample-length 5

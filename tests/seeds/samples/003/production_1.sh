# 003, "Production Training". Changed: module, whose model is a script here; its flags follow --; 2 processes on each of 2 nodes, the address, sizes, 4 steps; the command of the other node is in production_0.sh. Corrected (2 lines): --node-rank, as two commands of one process each are not 16 processes.
# Node 2 (ranks 8-15)
python -m distributed.cli train --script char_gpt.py \
    --num-nodes 2 \
    --nproc-per-node 2 \
    --node-rank 1 \
    --master-addr 10.99.0.1 \
    --master-port 29500 \
    --batch-size 8 \
    --learning-rate 2e-4 \
    --max-steps 4 \
    -- --hidden-size 32 --attention-heads 2 --layers 2 --vocab-size 64 --max-seq-length 32 --sample-length 5

# 001, "Environment Setup". Nothing is changed.
# No additional setup required
python your_distributed_script.py

"""Write the hidden states of a verifier over conversations to a store.

python extract.py model=qwen3_8b data=sharegpt hardware=hopper8
"""

from eagle3lab.cli import main

if __name__ == "__main__":
    main("extract")

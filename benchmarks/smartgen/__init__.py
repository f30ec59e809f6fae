"""SmartGen's figures on this testbed, paper beside measured; `python -m benchmarks.smartgen` makes all of them.

Numbers of the paper are those that its text states; nothing is read off its plots. Its testbed prefills on several GPUs
and decodes on one, its prompts have up to 48K tokens, its models 8 to 14 billion parameters; here one process prefills
and one decodes on the cores of one machine, with the bundled model. Links are narrowed so that Tt/Tp is the paper's.
"""

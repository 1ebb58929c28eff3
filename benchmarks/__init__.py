"""`python -m benchmarks`, in a clone: the figures of the project, beside those of its peers.

It is `python -m tfmulti.bench` with more kinds of training, and more made of what was measured.
`kinds` has the flags and what is measured beside what users measure, `peers` a file for each peer,
`training` what runs in the processes of Keras, `socket_copy` the floor of an all-reduce. `tables`,
`projection` and `plot` make figures of the result; `monitors` is a measurement of its own.
"""

/* XXH3-128 step by step, over inputs longer than 240 bytes: begin, whole blocks, end. And what the extension's other file
 * adds to its methods. */
#ifndef KVTIER_STEPS_H
#define KVTIER_STEPS_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))

enum { STRIPE = 64, LANES = 8, BLOCK = 1024 };

HIDDEN void hash_begin(uint64_t acc[LANES]);
/* All of the input's blocks but the last, which may be whole, in order. */
HIDDEN void hash_blocks(uint64_t acc[LANES], const uint8_t *data, size_t blocks);
/* rest: what is behind those blocks. last: the input's last bytes. total: its length. out: as xxhsum prints it. */
HIDDEN void hash_end(uint64_t acc[LANES], const uint8_t *rest, const uint8_t last[STRIPE], size_t total,
                     uint8_t out[16]);

HIDDEN PyObject *receive(PyObject *self, PyObject *args);
HIDDEN PyObject *turn(PyObject *self, PyObject *args);

#endif

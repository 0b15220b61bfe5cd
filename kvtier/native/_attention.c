/* kvtier.native._attention: paged decode attention and the steps between a decoder's matrix products, for bfloat16
 * and float32 on CPUs; see kvtier/native/attention.py. Threads are OpenMP's: where torch was imported first, its own
 * libgomp serves this module too, so both share one pool of threads.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bfloat16 is taken from the upper half of a float32 in memory: little-endian only"
#endif

#define INTERFACE 1
#define INLINE inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
/* 1.5 * 2**23: added to a small float, it leaves the nearest integer (ties to even) in the low bits. */
#define ROUNDER 12582912.0f
#define LOG2_E 1.44269504088896341f
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#define LANES 16
#define MAX_WIDTH 256
/* Tokens scored together; queries of a group that share a walk over the KV; registers of a strip of the result. */
#define TILE 16
#define HEADS 4
#define STRIP 4
/* Below these many bytes a second thread costs more than it saves. */
#define SHARED_BYTES (64 << 10)

enum { FLOAT32, BFLOAT16, DTYPES };

static const size_t ITEMSIZE[DTYPES] = {4, 2};

#define LIST4(h, F) F(0, h), F(1, h), F(2, h), F(3, h)
#define LIST8(h, F) LIST4(h, F), F(4, h), F(5, h), F(6, h), F(7, h)
#define LIST16(h, F)                                                                                                   \
    LIST8(h, F), F(8, h), F(9, h), F(10, h), F(11, h), F(12, h), F(13, h), F(14, h), F(15, h)
#define LANE(k, h) (k)
#define ROTATED(k, h) (((k) + (h)) & (VECTOR - 1))
#define EVEN(k, h) (2 * (k) + (h))

/* Short loops over registers: an array of vectors is kept in registers only where all of its indices are constants. */
#if defined(__clang__)
#define UNROLL(n) _Pragma("unroll")
#else
#define PRAGMA(text) _Pragma(#text)
#define UNROLL(n) PRAGMA(GCC unroll 16)
#endif

#define PREFETCH(from, nbytes)                                                                                         \
    for (size_t line_ = 0; line_ < (nbytes); line_ += 64)                                                              \
    __builtin_prefetch((from) + line_)

/* Rows are tokens with a query, each the last one of its context; pieces are stretches of a row's context. */
typedef struct {
    const char *pool, *q;
    char *out;
    const int32_t *blocks, *piece_rows, *piece_starts;
    const int64_t *rows, *lengths, *tables, *first_pieces;
    float *partials;
    size_t block_bytes, plane_bytes, block_size, kv_heads, group, width, q_bytes, count, pieces, piece_tokens, window;
    int dtype;
    float scale;
} attend_t;

typedef struct {
    char *x, *out;
    const char *change, *weight;
    size_t outer, inner, x_bytes, width;
    int dtype;
    float eps;
} norm_t;

typedef struct {
    char *x;
    const char *cos, *sin;
    size_t count, x_bytes, heads, width;
    int dtype;
} turn_t;

typedef struct {
    const char *x;
    char *out;
    size_t count, width;
    int dtype;
} gate_t;

#define LEVEL baseline
#define VECTOR 4
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#define AT_LEAST(x, low) NAME(choose)((x) < (low), low, x)
#define AT_MOST(x, high) NAME(choose)((x) > (high), high, x)
#include "_attention_kernels.h"
#undef AT_MOST
#undef AT_LEAST
#undef MULTIPLY_ADD
#undef VECTOR
#undef LEVEL

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi2,fma")
#endif
#define LEVEL avx2
#define VECTOR 8
#define MULTIPLY_ADD(a, b, c) ((floats)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define AT_LEAST(x, low) ((floats)_mm256_max_ps((__m256)(low), (__m256)(x)))
#define AT_MOST(x, high) ((floats)_mm256_min_ps((__m256)(high), (__m256)(x)))
#include "_attention_kernels.h"
#undef AT_MOST
#undef AT_LEAST
#undef MULTIPLY_ADD
#undef VECTOR
#undef LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,bmi2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,bmi2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define LEVEL avx512
#define VECTOR 16
#define MULTIPLY_ADD(a, b, c) ((floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define AT_LEAST(x, low) ((floats)_mm512_max_ps((__m512)(low), (__m512)(x)))
#define AT_MOST(x, high) ((floats)_mm512_min_ps((__m512)(high), (__m512)(x)))
#include "_attention_kernels.h"
#undef AT_MOST
#undef AT_LEAST
#undef MULTIPLY_ADD
#undef VECTOR
#undef LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif /* __x86_64__ */

typedef struct {
    const char *name;
    void (*attend_piece)(const attend_t *, size_t, size_t);
    void (*attend_merge)(const attend_t *, size_t, size_t);
    void (*norm)(const norm_t *, size_t);
    void (*turn)(const turn_t *, size_t);
    void (*gate)(const gate_t *, size_t);
} level_t;

#define KERNELS(name) {#name, attend_piece_##name, attend_merge_##name, norm_##name, turn_##name, gate_##name}

static const level_t ALL_LEVELS[] = {
    KERNELS(baseline),
#if defined(__x86_64__)
    KERNELS(avx2),
    KERNELS(avx512),
#endif
};

static const level_t *current = ALL_LEVELS;

static size_t level_count(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? 3 : avx2 ? 2 : 1;
#else
    return 1;
#endif
}

static const level_t *level(void)
{
    return __atomic_load_n(&current, __ATOMIC_RELAXED);
}

/* ---- arguments ------------------------------------------------------------------------------------------------ */

/* Addresses and sizes, as integers: the caller checked shapes, strides and dtypes. */
static int integers(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, int64_t *values)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments: expected %zd", given, wanted);
        return 0;
    }
    for (Py_ssize_t k = 0; k < given; k++) {
        values[k] = PyLong_AsLongLong(args[k]);
        if (values[k] == -1 && PyErr_Occurred())
            return 0;
        if (values[k] < 0) {
            PyErr_Format(PyExc_ValueError, "argument %zd is %lld: no address, size or count is negative", k,
                         (long long)values[k]);
            return 0;
        }
    }
    return 1;
}

static PyObject *refused(const char *why)
{
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

#define POINTER(type, k) ((type *)(uintptr_t)n[k])

static PyObject *attend(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    int64_t n[24];
    if (!integers(args, given, 24, n))
        return NULL;
    attend_t a = {
        .pool = POINTER(char, 0), .block_bytes = (size_t)n[1], .plane_bytes = (size_t)n[2],
        .block_size = (size_t)n[3], .kv_heads = (size_t)n[4], .group = (size_t)n[5], .width = (size_t)n[6],
        .dtype = (int)n[7], .window = (size_t)n[8], .q = POINTER(char, 9), .q_bytes = (size_t)n[10],
        .out = POINTER(char, 11), .count = (size_t)n[12], .rows = POINTER(int64_t, 13),
        .lengths = POINTER(int64_t, 14), .tables = POINTER(int64_t, 15), .blocks = POINTER(int32_t, 16),
        .pieces = (size_t)n[17], .piece_rows = POINTER(int32_t, 18), .piece_starts = POINTER(int32_t, 19),
        .first_pieces = POINTER(int64_t, 20), .piece_tokens = (size_t)n[21], .partials = POINTER(float, 22),
    };
    int threads = (int)n[23];
    if (n[7] >= DTYPES || !a.width || a.width > MAX_WIDTH || a.width % LANES || !a.block_size || !a.kv_heads || !a.group)
        return refused("expected float32 or bfloat16, a head size that is a multiple of 16 up to 256, and heads");
    a.scale = 1.0f / sqrtf((float)a.width);
    const level_t *run = level();
    Py_BEGIN_ALLOW_THREADS
    size_t tasks = a.pieces * a.kv_heads, heads = a.kv_heads * a.group, merges = a.count * heads;
#pragma omp parallel num_threads(threads) if (threads > 1 && tasks > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t task = 0; task < tasks; task++)
            run->attend_piece(&a, task / a.kv_heads, task % a.kv_heads);
#pragma omp for schedule(static)
        for (size_t merge = 0; merge < merges; merge++)
            run->attend_merge(&a, merge / heads, merge % heads);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *write_rows(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    int64_t n[13];
    if (!integers(args, given, 13, n))
        return NULL;
    char *pool = POINTER(char, 0);
    size_t block_bytes = (size_t)n[1], plane_bytes = (size_t)n[2], block_size = (size_t)n[3];
    size_t heads = (size_t)n[4], row_bytes = (size_t)n[5], k_bytes = (size_t)n[7], v_bytes = (size_t)n[9];
    const char *k = POINTER(char, 6), *v = POINTER(char, 8);
    const int64_t *slots = POINTER(int64_t, 10);
    size_t count = (size_t)n[11];
    int threads = (int)n[12];
    if (!block_size)
        return refused("a block holds at least one token");
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * heads * row_bytes > SHARED_BYTES)
    for (size_t token = 0; token < count; token++) {
        size_t slot = (size_t)slots[token];
        char *to = pool + slot / block_size * block_bytes + slot % block_size * row_bytes;
        for (size_t head = 0; head < heads; head++, to += block_size * row_bytes) {
            memcpy(to, k + token * k_bytes + head * row_bytes, row_bytes);
            memcpy(to + plane_bytes, v + token * v_bytes + head * row_bytes, row_bytes);
        }
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *rms_norm(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    int64_t n[10];
    if (!integers(args, given - 1, 10, n))
        return NULL;
    double eps = PyFloat_AsDouble(args[10]);
    if (PyErr_Occurred())
        return NULL;
    norm_t norm = {
        .x = POINTER(char, 0), .change = POINTER(char, 1), .weight = POINTER(char, 2), .out = POINTER(char, 3),
        .outer = (size_t)n[4], .inner = (size_t)n[5], .x_bytes = (size_t)n[6], .width = (size_t)n[7],
        .dtype = (int)n[8], .eps = (float)eps,
    };
    int threads = (int)n[9];
    if (n[8] >= DTYPES || !norm.width || norm.width % LANES || !norm.inner)
        return refused("expected float32 or bfloat16 and rows of a multiple of 16 elements");
    const level_t *run = level();
    size_t rows = norm.outer * norm.inner, nbytes = rows * norm.width * ITEMSIZE[norm.dtype];
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) if (threads > 1 && nbytes > SHARED_BYTES)
    for (size_t row = 0; row < rows; row++)
        run->norm(&norm, row);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *rotate(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    int64_t n[9];
    if (!integers(args, given, 9, n))
        return NULL;
    turn_t turn = {
        .x = POINTER(char, 0), .x_bytes = (size_t)n[1], .cos = POINTER(char, 2), .sin = POINTER(char, 3),
        .count = (size_t)n[4], .heads = (size_t)n[5], .width = (size_t)n[6], .dtype = (int)n[7],
    };
    int threads = (int)n[8];
    if (n[7] >= DTYPES || !turn.width || turn.width % (2 * LANES))
        return refused("expected float32 or bfloat16 and heads of a multiple of 32 elements");
    const level_t *run = level();
    size_t nbytes = turn.count * turn.heads * turn.width * ITEMSIZE[turn.dtype];
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) if (threads > 1 && nbytes > SHARED_BYTES)
    for (size_t row = 0; row < turn.count; row++)
        run->turn(&turn, row);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *silu_times(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    int64_t n[6];
    if (!integers(args, given, 6, n))
        return NULL;
    gate_t gate = {
        .x = POINTER(char, 0), .out = POINTER(char, 1), .count = (size_t)n[2], .width = (size_t)n[3],
        .dtype = (int)n[4],
    };
    int threads = (int)n[5];
    if (n[4] >= DTYPES || !gate.width || gate.width % LANES)
        return refused("expected float32 or bfloat16 and rows of a multiple of 16 elements");
    const level_t *run = level();
    size_t nbytes = gate.count * gate.width * ITEMSIZE[gate.dtype];
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads) if (threads > 1 && nbytes > SHARED_BYTES)
    for (size_t row = 0; row < gate.count; row++)
        run->gate(&gate, row);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- the module ----------------------------------------------------------------------------------------------- */

static PyObject *levels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    Py_ssize_t count = (Py_ssize_t)level_count();
    PyObject *names = PyTuple_New(count);
    for (Py_ssize_t k = 0; names && k < count; k++) {
        PyObject *name = PyUnicode_FromString(ALL_LEVELS[k].name);
        if (!name) {
            Py_CLEAR(names);
            break;
        }
        PyTuple_SET_ITEM(names, k, name);
    }
    return names;
}

static PyObject *set_level(PyObject *Py_UNUSED(module), PyObject *name)
{
    const char *wanted = PyUnicode_AsUTF8(name);
    if (!wanted)
        return NULL;
    for (size_t k = 0; k < level_count(); k++)
        if (!strcmp(ALL_LEVELS[k].name, wanted)) {
            __atomic_store_n(&current, &ALL_LEVELS[k], __ATOMIC_RELAXED);
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "level %R is not one that this CPU has", name);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, "See kvtier.native.attention.Kernels."}

static PyMethodDef METHODS[] = {
    FAST(attend),
    FAST(write_rows),
    FAST(rms_norm),
    FAST(rotate),
    FAST(silu_times),
    {"levels", levels, METH_NOARGS, "CPU levels that this machine can run, best last."},
    {"set_level", set_level, METH_O, "Run the kernels that were compiled for this level."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "kvtier.native._attention",
    .m_doc = "Paged attention and fused steps on CPU; see kvtier.native.attention.Kernels.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__attention(void)
{
    return PyModuleDef_Init(&MODULE);
}

/* kvtier.native._codecs: the row kernels of kvtier/native/rows.py, compiled for several CPU levels in one module. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "blocks are little-endian; the numpy kernels are used on this machine"
#endif

#define INTERFACE 1
#define INLINE inline __attribute__((always_inline))
#define MAX_WIDTH 8192
#define LANES 16
#define HALF_MAX 65504.0f
/* 1.5 * 2**23: added to a small float, it leaves the nearest integer (ties to even) in the low bits. */
#define ROUNDER 12582912.0f

enum { COPY, INT8, FP8, INT4, LLOYD4, CODECS };
enum { FLOAT32, BFLOAT16, FLOAT16, DTYPES = 5 };

/* Buffers come from anywhere: rows of odd length leave their neighbours unaligned. */
typedef uint16_t __attribute__((aligned(1), may_alias)) u16u;
typedef uint32_t __attribute__((aligned(1), may_alias)) u32u;

#define LIST4(h, F) F(0, h), F(1, h), F(2, h), F(3, h)
#define LIST8(h, F) LIST4(h, F), F(4, h), F(5, h), F(6, h), F(7, h)
#define LIST16(h, F)                                                                                                   \
    LIST8(h, F), F(8, h), F(9, h), F(10, h), F(11, h), F(12, h), F(13, h), F(14, h), F(15, h)
#define PARTNER(k, h) ((k) ^ (h))
#define SIGN(k, h) ((k) & (h) ? INT32_MIN : 0)
#if defined(__clang__)
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLE(v, ...) __builtin_shuffle(v, (ints){__VA_ARGS__})
#endif

typedef struct {
    size_t outer, inner, width, group, rotation;
    size_t raw_offset, raw_outer, raw_row;
    size_t coded_offset, coded_outer, coded_row;
} run_t;

static const size_t ITEMSIZE[DTYPES] = {4, 2, 2, 1, 1};
static const size_t META_BYTES[CODECS] = {0, 2, 2, 4, 2};
static const float LIMITS[CODECS] = {0.0f, 127.0f * HALF_MAX, 448.0f * HALF_MAX, HALF_MAX, 32768.0f};

/* Set from kvtier.native.rows at import, so that both implementations have one table. */
static float LEVELS[16], THRESHOLDS[15];

static INLINE float as_f32(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static INLINE uint32_t as_u32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Branch-free, and without float32 denormals, which a thread may have told its CPU to flush. */
static INLINE float half_to_f32(uint16_t half)
{
    uint32_t kept = half & 0x7fff;
    uint32_t wide = (kept << 13) + (kept < 0x7c00 ? 112u << 23 : 224u << 23);
    float magnitude = kept < 0x400 ? (float)(int32_t)kept * 0x1p-24f : as_f32(wide);
    return as_f32(as_u32(magnitude) | ((uint32_t)(half & 0x8000) << 16));
}

/* Nearest, ties to even, for magnitudes up to HALF_MAX. */
static INLINE uint16_t f32_to_half(float value)
{
    uint32_t bits = as_u32(value), kept = bits & 0x7fffffff;
    uint32_t normal = ((kept + 0xfff + ((kept >> 13) & 1)) >> 13) - (112u << 10);
    uint32_t small = as_u32(as_f32(kept) + 0.5f) - 0x3f000000;
    return (uint16_t)((kept < 0x38800000 ? small : normal) | ((bits >> 16) & 0x8000));
}

/* Maps the bits of floats to integers of the same order, and back. */
static INLINE int32_t ordered(int32_t bits)
{
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static INLINE uint16_t fit_scale(float span, float top, float room)
{
    uint16_t scale = f32_to_half(span / top);
    return half_to_f32(scale) * room < span ? (uint16_t)(scale + 1) : scale;
}

static INLINE float inverse_of(uint16_t scale)
{
    return scale ? 1.0f / half_to_f32(scale) : 0.0f;
}

#define LEVEL baseline
#define VECTOR 4
#include "_kernels.h"
#undef VECTOR
#undef LEVEL

#if defined(__x86_64__)
#define AVX2 "avx2,bmi2,f16c"
#define AVX512 AVX2 ",avx512f,avx512bw,avx512dq,avx512vl"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target(AVX2))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi2,f16c")
#endif
#define LEVEL avx2
#define VECTOR 8
#include "_kernels.h"
#undef VECTOR
#undef LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target(AVX512))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define LEVEL avx512
#define VECTOR 16
#include "_kernels.h"
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
    int64_t (*encode)(const run_t *, int, int, const uint8_t *, uint8_t *, const float *);
    void (*decode)(const run_t *, int, int, const uint8_t *, uint8_t *, const float *);
    void (*split)(const uint8_t *, size_t, size_t, uint8_t *const *);
    void (*join)(uint8_t *const *, size_t, size_t, uint8_t *);
} level_t;

#define KERNELS(name) {#name, encode_rows_##name, decode_rows_##name, split_##name, join_##name}

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
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? 3 : avx2 ? 2 : 1;
#else
    return 1;
#endif
}

/* COPY has no arithmetic, hence no level. */
static void copy_rows(const run_t *run, size_t nbytes, const uint8_t *raw_in, uint8_t *coded_out, uint8_t *raw_out,
                      const uint8_t *coded_in)
{
    for (size_t o = 0; o < run->outer; o++)
        for (size_t i = 0; i < run->inner; i++) {
            size_t raw = run->raw_offset + o * run->raw_outer + i * run->raw_row;
            size_t coded = run->coded_offset + o * run->coded_outer + i * run->coded_row;
            if (coded_out)
                memcpy(coded_out + coded, raw_in + raw, nbytes);
            else
                memcpy(raw_out + raw, coded_in + coded, nbytes);
        }
}

/* ---- arguments ------------------------------------------------------------------------------------------------ */

typedef struct {
    int codec, dtype;
    Py_buffer raw, coded, signs;
    run_t run;
    size_t row_bytes;
} call_t;

static int end_of_rows(const run_t *run, size_t offset, size_t outer, size_t row, size_t nbytes, size_t *end)
{
    size_t a, b, sum;
    return __builtin_mul_overflow(run->outer - 1, outer, &a) || __builtin_mul_overflow(run->inner - 1, row, &b) ||
           __builtin_add_overflow(a, b, &sum) || __builtin_add_overflow(sum, offset, &sum) ||
           __builtin_add_overflow(sum, nbytes, end);
}

static size_t record_bytes(const call_t *call)
{
    const run_t *run = &call->run;
    if (call->codec == COPY)
        return run->width * ITEMSIZE[call->dtype];
    size_t codes = call->codec == INT4 || call->codec == LLOYD4 ? (run->width + 1) / 2 : run->width;
    return run->width / run->group * META_BYTES[call->codec] + codes;
}

/* Everything that the loops take on trust; returns what is wrong, or NULL. */
static const char *complaint(call_t *call)
{
    const run_t *run = &call->run;
    size_t raw_end, coded_end;
    if (call->codec < 0 || call->codec >= CODECS)
        return "unknown codec";
    if (call->dtype < 0 || call->dtype >= DTYPES || (call->codec != COPY && call->dtype > FLOAT16))
        return "dtype does not belong to the codec";
    if (!run->outer || !run->inner || !run->width || !run->group || !run->rotation)
        return "outer, inner, width, group and rotation must be at least 1";
    if (run->width > MAX_WIDTH || run->width % run->group)
        return "rows too wide, or group does not divide width";
    if ((run->rotation & (run->rotation - 1)) || run->width % run->rotation)
        return "rotation is no power of two that divides width";
    if ((call->signs.buf != NULL) != (run->rotation > 1))
        return "signs are for rotated rows, and only for them";
    if (call->signs.buf && (size_t)call->signs.len != run->width * sizeof(float))
        return "signs must have one float32 per element of a row";
    call->row_bytes = run->width * ITEMSIZE[call->dtype];
    if (end_of_rows(run, run->raw_offset, run->raw_outer, run->raw_row, call->row_bytes, &raw_end) ||
        raw_end > (size_t)call->raw.len)
        return "rows lie outside the raw buffer";
    if (end_of_rows(run, run->coded_offset, run->coded_outer, run->coded_row, record_bytes(call), &coded_end) ||
        coded_end > (size_t)call->coded.len)
        return "rows lie outside the coded buffer";
    return NULL;
}

static void release(call_t *call)
{
    PyBuffer_Release(&call->raw);
    PyBuffer_Release(&call->coded);
    if (call->signs.obj)
        PyBuffer_Release(&call->signs);
}

static int parse(PyObject *args, int encoding, call_t *call)
{
    Py_ssize_t n[11];
    memset(call, 0, sizeof *call);
    Py_buffer *one = encoding ? &call->raw : &call->coded, *two = encoding ? &call->coded : &call->raw;
    if (!PyArg_ParseTuple(args, "iiy*w*(nnnnnnnnnnn)z*", &call->codec, &call->dtype, one, two, &n[0], &n[1], &n[2],
                          &n[3], &n[4], &n[5], &n[6], &n[7], &n[8], &n[9], &n[10], &call->signs))
        return 0;
    const char *wrong = NULL;
    for (int k = 0; k < 11; k++)
        if (n[k] < 0)
            wrong = "a run has no negative numbers";
    call->run = (run_t){(size_t)n[0], (size_t)n[1], (size_t)n[2], (size_t)n[3], (size_t)n[4], (size_t)n[5],
                        (size_t)n[6], (size_t)n[7], (size_t)n[8], (size_t)n[9], (size_t)n[10]};
    if (!wrong)
        wrong = complaint(call);
    if (wrong) {
        release(call);
        PyErr_SetString(PyExc_ValueError, wrong);
        return 0;
    }
    return 1;
}

static PyObject *encode_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    call_t call;
    if (!parse(args, 1, &call))
        return NULL;
    int64_t refused = -1;
    const level_t *level = __atomic_load_n(&current, __ATOMIC_RELAXED);
    Py_BEGIN_ALLOW_THREADS
    if (call.codec == COPY)
        copy_rows(&call.run, call.row_bytes, call.raw.buf, call.coded.buf, NULL, NULL);
    else
        refused = level->encode(&call.run, call.codec, call.dtype, call.raw.buf, call.coded.buf, call.signs.buf);
    Py_END_ALLOW_THREADS
    release(&call);
    return PyLong_FromLongLong(refused);
}

static PyObject *decode_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    call_t call;
    if (!parse(args, 0, &call))
        return NULL;
    const level_t *level = __atomic_load_n(&current, __ATOMIC_RELAXED);
    Py_BEGIN_ALLOW_THREADS
    if (call.codec == COPY)
        copy_rows(&call.run, call.row_bytes, NULL, NULL, call.raw.buf, call.coded.buf);
    else
        level->decode(&call.run, call.codec, call.dtype, call.coded.buf, call.raw.buf, call.signs.buf);
    Py_END_ALLOW_THREADS
    release(&call);
    Py_RETURN_NONE;
}

/* ---- planes --------------------------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer raw, planes[4];
    uint8_t *bytes[4];
    Py_ssize_t count, held;
} planes_t;

static void release_planes(planes_t *call)
{
    PyBuffer_Release(&call->raw);
    for (Py_ssize_t k = 0; k < call->held; k++)
        PyBuffer_Release(&call->planes[k]);
}

static int take_planes(planes_t *call, PyObject *tuple, int flags)
{
    call->count = PyTuple_GET_SIZE(tuple);
    call->held = 0;
    if (call->count != 1 && call->count != 2 && call->count != 4) {
        PyErr_Format(PyExc_ValueError, "%zd planes: expected 1, 2 or 4", call->count);
        return 0;
    }
    for (Py_ssize_t k = 0; k < call->count; k++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(tuple, k), &call->planes[k], flags) < 0)
            return 0;
        call->held++;
        call->bytes[k] = call->planes[k].buf;
        if (call->planes[k].len != call->raw.len / call->count || call->raw.len % call->count) {
            PyErr_Format(PyExc_ValueError, "planes do not add up to %zd bytes", call->raw.len);
            return 0;
        }
    }
    return 1;
}

static PyObject *split_planes(PyObject *Py_UNUSED(module), PyObject *args)
{
    planes_t call;
    PyObject *tuple;
    if (!PyArg_ParseTuple(args, "y*O!", &call.raw, &PyTuple_Type, &tuple))
        return NULL;
    if (!take_planes(&call, tuple, PyBUF_WRITABLE)) {
        release_planes(&call);
        return NULL;
    }
    const level_t *level = __atomic_load_n(&current, __ATOMIC_RELAXED);
    Py_BEGIN_ALLOW_THREADS
    if (call.count == 1)
        memcpy(call.bytes[0], call.raw.buf, (size_t)call.raw.len);
    else
        level->split(call.raw.buf, (size_t)call.count, (size_t)(call.raw.len / call.count), call.bytes);
    Py_END_ALLOW_THREADS
    release_planes(&call);
    Py_RETURN_NONE;
}

static PyObject *join_planes(PyObject *Py_UNUSED(module), PyObject *args)
{
    planes_t call;
    PyObject *tuple;
    if (!PyArg_ParseTuple(args, "O!w*", &PyTuple_Type, &tuple, &call.raw))
        return NULL;
    if (!take_planes(&call, tuple, PyBUF_SIMPLE)) {
        release_planes(&call);
        return NULL;
    }
    const level_t *level = __atomic_load_n(&current, __ATOMIC_RELAXED);
    Py_BEGIN_ALLOW_THREADS
    if (call.count == 1)
        memcpy(call.raw.buf, call.bytes[0], (size_t)call.raw.len);
    else
        level->join(call.bytes, (size_t)call.count, (size_t)(call.raw.len / call.count), call.raw.buf);
    Py_END_ALLOW_THREADS
    release_planes(&call);
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

static PyMethodDef METHODS[] = {
    {"encode_rows", encode_rows, METH_VARARGS, "See kvtier.native.rows.Kernels."},
    {"decode_rows", decode_rows, METH_VARARGS, "See kvtier.native.rows.Kernels."},
    {"split_planes", split_planes, METH_VARARGS, "See kvtier.native.rows.Kernels."},
    {"join_planes", join_planes, METH_VARARGS, "See kvtier.native.rows.Kernels."},
    {"levels", levels, METH_NOARGS, "CPU levels that this machine can run, best last."},
    {"set_level", set_level, METH_O, "Run the kernels that were compiled for this level."},
    {NULL, NULL, 0, NULL},
};

static int read_table(PyObject *rows, const char *name, float *table, size_t nbytes)
{
    Py_buffer view;
    PyObject *array = PyObject_GetAttrString(rows, name);
    if (!array)
        return -1;
    int failed = PyObject_GetBuffer(array, &view, PyBUF_SIMPLE);
    Py_DECREF(array);
    if (failed)
        return -1;
    int fits = (size_t)view.len == nbytes;
    if (fits)
        memcpy(table, view.buf, nbytes);
    else
        PyErr_Format(PyExc_ImportError, "kvtier.native.rows.%s has %zd bytes", name, view.len);
    PyBuffer_Release(&view);
    return fits ? 0 : -1;
}

static int execute(PyObject *module)
{
    PyObject *rows = PyImport_ImportModule("kvtier.native.rows");
    if (!rows)
        return -1;
    int failed = read_table(rows, "LLOYD_LEVELS", LEVELS, sizeof LEVELS) ||
                 read_table(rows, "LLOYD_THRESHOLDS", THRESHOLDS, sizeof THRESHOLDS);
    Py_DECREF(rows);
    return failed ? -1 : PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
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
    .m_name = "kvtier.native._codecs",
    .m_doc = "Row kernels; see kvtier.native.rows.Kernels.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__codecs(void)
{
    return PyModuleDef_Init(&MODULE);
}

/* kvtier.native._products: x @ weight.T in bfloat16 on AMX tiles, for weights packed once; see kvtier/native/products.py.
 *
 *     packed    [N / 32][K / 32] steps of two tiles, 1 KiB each; a tile holds 32 k of 16 outputs, k in pairs:
 *               tile[k / 2][output][k % 2]
 *
 * so that one walk over the packed weights, from the first byte to the last, computes a product with up to 32 rows.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_TILES 1
#endif

#define INTERFACE 1
#define SIDE 16          /* rows of a tile; outputs of one */
#define DEPTH 32         /* k of a tile */
#define TILE (SIDE * DEPTH)
#define PANEL (2 * SIDE) /* outputs that a walk computes together */
#define ROWS (2 * SIDE)  /* rows of x likewise */
#define CHUNK 8          /* panels that stay in the second cache while all rows of x pass by */
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef struct {
    const uint16_t *x, *packed;
    uint16_t *out;
    size_t rows, x_row, depth, outputs;
} product_t;

#ifdef HAVE_TILES

#define TILES __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")))

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) config_t;

/* Linux hands out tile registers to processes that ask. */
static int have_tiles(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-bf16") &&
           !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

/* Registers 0..3: the result, by rows and outputs; 4, 5: x; 6, 7: weights. */
static config_t config_for(size_t low_rows, size_t high_rows)
{
    config_t config = {.palette = 1};
    for (int k = 0; k < 8; k++) {
        config.row_bytes[k] = 64;
        config.rows[k] = SIDE;
    }
    config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)low_rows;
    config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)(high_rows ? high_rows : SIDE);
    return config;
}

static inline __attribute__((always_inline)) TILES void store_rows(const product_t *p, float (*tiles)[SIDE][SIDE],
                                                                   size_t row, size_t rows, size_t panel)
{
    for (size_t r = 0; r < rows; r++) {
        __m512 low = _mm512_load_ps(tiles[0][r]), high = _mm512_load_ps(tiles[1][r]);
        __m512bh pair = _mm512_cvtne2ps_pbh(high, low);
        memcpy(p->out + (row + r) * p->outputs + panel * PANEL, &pair, sizeof pair);
    }
}

static inline __attribute__((always_inline)) TILES void multiply(const product_t *p, size_t row, size_t rows,
                                                                 size_t panel)
{
    float result[4][SIDE][SIDE] __attribute__((aligned(64)));
    size_t stride = p->x_row * sizeof(uint16_t);
    const uint16_t *weights = p->packed + panel * PANEL * p->depth, *x = p->x + row * p->x_row;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (rows <= SIDE)
        for (size_t k = 0; k < p->depth; k += DEPTH, weights += 2 * TILE) {
            _tile_loadd(4, x + k, stride);
            _tile_loadd(6, weights, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    else
        for (size_t k = 0; k < p->depth; k += DEPTH, weights += 2 * TILE) {
            _tile_loadd(4, x + k, stride);
            _tile_loadd(6, weights, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, x + SIDE * p->x_row + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(7, weights + TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    _tile_stored(0, result[0], 64);
    _tile_stored(1, result[1], 64);
    store_rows(p, result, row, MIN(rows, SIDE), panel);
    if (rows <= SIDE)
        return;
    _tile_stored(2, result[2], 64);
    _tile_stored(3, result[3], 64);
    store_rows(p, result + 2, row + SIDE, rows - SIDE, panel);
}

/* Panels [first, last). Whoever configured the tiles of this thread finds them as they were. */
static TILES void multiply_panels(const product_t *p, size_t first, size_t last)
{
    size_t rows = MIN(p->rows, ROWS);
    config_t before, config = config_for(MIN(rows, SIDE), rows > SIDE ? rows - SIDE : 0);
    _tile_storeconfig(&before);
    _tile_loadconfig(&config);
    for (size_t chunk = first; chunk < last; chunk += CHUNK)
        for (size_t row = 0; row < p->rows; row += rows)
            for (size_t panel = chunk; panel < MIN(chunk + CHUNK, last); panel++)
                /* Rows left over are computed together with those before them once more: tiles keep their shape. */
                multiply(p, MIN(row, p->rows - rows), rows, panel);
    _tile_loadconfig(&before);
}

#else

static int have_tiles(void)
{
    return 0;
}

static void multiply_panels(const product_t *p, size_t first, size_t last)
{
    (void)p, (void)first, (void)last;
}

#endif

/* ---- the module ----------------------------------------------------------------------------------------------- */

static int available;

static int integers(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, size_t *values)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments: expected %zd", given, wanted);
        return 0;
    }
    for (Py_ssize_t k = 0; k < given; k++) {
        Py_ssize_t value = PyLong_AsSsize_t(args[k]);
        if (value == -1 && PyErr_Occurred())
            return 0;
        if (value < 0) {
            PyErr_Format(PyExc_ValueError, "argument %zd is %zd: no address, size or count is negative", k, value);
            return 0;
        }
        values[k] = (size_t)value;
    }
    return 1;
}

static PyObject *product(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    size_t n[8];
    if (!integers(args, given, 8, n))
        return NULL;
    product_t p = {(const uint16_t *)n[0], (const uint16_t *)n[1], (uint16_t *)n[2], n[3], n[4], n[5], n[6]};
    int threads = (int)n[7];
    if (!available || !p.depth || p.depth % DEPTH || p.outputs % PANEL) {
        PyErr_SetString(PyExc_ValueError, "expected a CPU with AMX, and depth and outputs that are multiples of 32");
        return NULL;
    }
    if (!p.rows) /* a tile has at least one row */
        Py_RETURN_NONE;
    size_t panels = p.outputs / PANEL;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#ifdef _OPENMP
        size_t count = (size_t)omp_get_num_threads(), self = (size_t)omp_get_thread_num();
#else
        size_t count = 1, self = 0;
#endif
        multiply_panels(&p, panels * self / count, panels * (self + 1) / count);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"product", (PyCFunction)(void (*)(void))product, METH_FASTCALL, "See kvtier.native.products.Products."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    available = have_tiles();
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) ||
           PyModule_AddIntConstant(module, "AVAILABLE", available);
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
    .m_name = "kvtier.native._products",
    .m_doc = "Products with packed bfloat16 weights; see kvtier.native.products.Products.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__products(void)
{
    return PyModuleDef_Init(&MODULE);
}

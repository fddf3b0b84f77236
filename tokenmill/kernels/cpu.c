/* The operations of a decoding step on a CPU, one call each; `kernels/native` compiles them, `native_calls` calls.

   Compiled once per dtype: BFLOAT16 chooses what an `element` is. Arithmetic is float32, rounded to an element
   where the torch references round. Strides count elements; the last dimension is contiguous. An operation takes
   one struct with all it needs, so that a recorded step is an array of them (`replay`).
   Letters: T tokens, H query heads, K key heads, D head size, R half of the rotated dimensions. */

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if BFLOAT16
typedef uint16_t element;

static inline float widen(element x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline element narrow(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (element)rounded;
}
#else
typedef float element;

static inline float widen(element x) { return x; }
static inline element narrow(float value) { return value; }
#endif

static inline float rounded(float value) { return widen(narrow(value)); }

/* 2^x to some 1e-7 of it; plain arithmetic, so that compilers turn loops of it into vectors. */
static inline float power_of_two(float x) {
    x = x < -126.0f ? -126.0f : x > 127.0f ? 127.0f : x;
    float whole = __builtin_floorf(x), part = x - whole - 0.5f;
    float p = 2.15706230e-5f; /* Taylor's series of 2^x around one half */
    p = p * part + 2.17838816e-4f;
    p = p * part + 1.88564988e-3f;
    p = p * part + 1.36020886e-2f;
    p = p * part + 7.84946632e-2f;
    p = p * part + 3.39731584e-1f;
    p = p * part + 9.80258143e-1f;
    p = p * part + 1.41421356f;
    uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

static const float LOG2_E = 1.44269504f;

/* ── work for several threads ──────────────────────────────────────────────────────────────── */

typedef void (*member)(void *);
typedef void (*team)(member, void *, unsigned, unsigned);
typedef int (*count)(void);
typedef void (*unit)(const void *, long);

struct job {
    unit run;
    const void *arguments;
    long units, grain, next;
};

/* GOMP_parallel and omp_get_max_threads of the OpenMP runtime that torch has loaded: one pool of workers for both. */
static team start_team;
static count most_threads;

void use_team(team start, count most) {
    start_team = start;
    most_threads = most;
}

static void work(void *shared) {
    struct job *job = shared;
    for (;;) {
        long first = __atomic_fetch_add(&job->next, job->grain, __ATOMIC_RELAXED);
        if (first >= job->units) return;
        long last = first + job->grain < job->units ? first + job->grain : job->units;
        for (long i = first; i < last; i++) job->run(job->arguments, i);
    }
}

static void share(unit run, const void *arguments, long units, long grain) {
    struct job job = {run, arguments, units, grain, 0};
    if (start_team && units > grain && most_threads() > 1)
        start_team(work, &job, 0, 0);
    else
        work(&job);
}

/* A thread is woken for no less than this many elements. */
static long grain_of(long elements_of_unit) {
    long grain = 16384 / (elements_of_unit + 1);
    return grain > 0 ? grain : 1;
}

/* ── a recorded step ───────────────────────────────────────────────────────────────────────── */

struct call {
    void (*run)(const void *);
    const void *arguments;
};

/* The calls, one after the other. */
void replay(const struct call *calls, long count) {
    for (long i = 0; i < count; i++) calls[i].run(calls[i].arguments);
}

/* ── rows of a table ───────────────────────────────────────────────────────────────────────── */

struct lookup {
    const element *table;
    const int64_t *ids;
    element *out;
    long num_ids, num_rows, size;
};

/* Row `ids[i]` of the table for every i; NaN where the table has no such row. */
void look_up(const struct lookup *a) {
    for (long i = 0; i < a->num_ids; i++) {
        element *out = a->out + i * a->size;
        if (a->ids[i] >= 0 && a->ids[i] < a->num_rows)
            memcpy(out, a->table + a->ids[i] * a->size, a->size * sizeof(element));
        else
            for (long j = 0; j < a->size; j++) out[j] = narrow(__builtin_nanf(""));
    }
}

/* ── products ──────────────────────────────────────────────────────────────────────────────── */

/* Weights are bfloat16, in columns of `width` outputs: [O / width][I / 2][width][2], O and I padded. So oneDNN
   keeps them for products in bfloat16. */
struct product {
    const void *x; /* elements, or, for `product_of_floats`, floats */
    const uint16_t *weight;
    const element *bias; /* NULL for none */
    element *out;
    long num_rows, num_inputs, num_outputs, padded_inputs, width;
};

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { AHEAD = 1024 }; /* 4 KB ahead, what memory needs to keep up with two cores */
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

static inline long smaller(long a, long b) { return a < b ? a : b; }

/* Sums of a row for up to `count` outputs from `begin` on. */
static inline void write_outputs(const struct product *a, const float *sums, long row, long begin, long count) {
    const long end = smaller(begin + count, a->num_outputs);
    element *out = a->out + row * a->num_outputs;
    for (long o = begin; o < end; o++) out[o] = narrow(sums[o - begin] + (a->bias ? widen(a->bias[o]) : 0.0f));
}

struct widening {
    const element *x;
    float *out;
    long num_rows, size;
};

static void widen_row(const void *arguments, long row) {
    const struct widening *a = arguments;
    for (long i = row * a->size; i < (row + 1) * a->size; i++) a->out[i] = widen(a->x[i]);
}

/* Rows for `product_of_floats`. */
void widen_rows(const struct widening *a) { share(widen_row, a, a->num_rows, grain_of(a->size)); }

/* ── product of few rows ───────────────────────────────────────────────────────────────────── */

#if BFLOAT16
/* sum + the products with two inputs */
static inline floats multiplied(floats sum, const uint32_t *weights, const element *x) {
    words w;
    memcpy(&w, weights, sizeof w);
#ifdef __AVX512BF16__
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    return sum + (floats)(w << 16) * widen(x[0]) + (floats)(w & 0xffff0000u) * widen(x[1]);
#endif
}

/* Sums of `count` rows from `first` on, for the outputs of a column: each pair of inputs after the one before. */
static inline __attribute__((always_inline)) void multiply(const struct product *a, long column, long first,
                                                            const long width, const long count) {
    const uint32_t *weights = (const uint32_t *)(a->weight + column * width * a->padded_inputs);
    const element *x = (const element *)a->x + first * a->num_inputs;
    floats sums[count][width / LANES];
    float outputs[width];
    memset(sums, 0, sizeof sums);
    for (long i = 0; i < a->num_inputs; i += 2, weights += width) {
#pragma GCC unroll 8
        for (long lane = 0; lane < width / LANES; lane++) {
#pragma GCC unroll 4
            for (long row = 0; row < count; row++)
                sums[row][lane] = multiplied(sums[row][lane], weights + lane * LANES, x + row * a->num_inputs + i);
        }
    }
    for (long row = 0; row < count; row++) {
        memcpy(outputs, sums[row], sizeof outputs);
        write_outputs(a, outputs, first + row, column * width, width);
    }
}

enum { ROWS_AT_ONCE = 4 }; /* whose sums stay in registers */
enum { RUN_BYTES = 1 << 20, RUNS_OF_THREAD = 8 };

static inline __attribute__((always_inline)) void multiply_some(const struct product *a, long column, long first,
                                                                 const long width) {
    switch (smaller(a->num_rows - first, ROWS_AT_ONCE)) {
    case 1: multiply(a, column, first, width, 1); break;
    case 2: multiply(a, column, first, width, 2); break;
    case 3: multiply(a, column, first, width, 3); break;
    default: multiply(a, column, first, width, 4);
    }
}

static long num_row_groups(const struct product *a) { return (a->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; }

/* Groups of rows meet a column one after the other, so that it is read from memory once. */
static void multiply_rows(const void *arguments, long unit) {
    const struct product *a = arguments;
    const long column = unit / num_row_groups(a), first = unit % num_row_groups(a) * ROWS_AT_ONCE;
    if (a->width == 16) multiply_some(a, column, first, 16);
    else if (a->width == 32) multiply_some(a, column, first, 32);
    else if (a->width == 48) multiply_some(a, column, first, 48);
    else multiply_some(a, column, first, 64);
}

/* Columns that a thread takes at a time. Memory is read fastest in long runs (measured on an AMD EPYC, without
   fetching ahead, which the processor does itself), but no thread should be the only one at work at the end. */
static long run_of_columns(const struct product *a, long num_columns) {
    const long threads = start_team ? most_threads() : 1;
    const long run = smaller(RUN_BYTES / (2 * a->width * a->padded_inputs), num_columns / (RUNS_OF_THREAD * threads));
    return run > 0 ? run : 1;
}

/* The most rows for which this keeps up with oneDNN: any number with instructions for bfloat16 was as quick, up to
   64 were tried. One row is quicker everywhere. */
long most_streamed_rows(void) {
#ifdef __AVX512BF16__
    return 64;
#else
    return 1;
#endif
}

/* x W^T + b of few rows; whole tiles of inputs. A row gets the same bits among any others. */
void product_of_rows(const struct product *a) {
    const long num_columns = (a->num_outputs + a->width - 1) / a->width;
    share(multiply_rows, a, num_columns * num_row_groups(a), run_of_columns(a, num_columns) * num_row_groups(a));
}

/* ── product of few rows, in tiles ─────────────────────────────────────────────────────── */

#ifdef __AMX_BF16__
enum { TILE_ROWS = 16, TILE_INPUTS = 32 };

struct tile_shapes { /* what LDTILECFG reads */
    uint8_t palette, start_row, unused[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
};

/* Sums in tiles 0 to 3, of 16 rows and 16 outputs each; 4 and 5 hold rows, 6 and 7 outputs. */
static void shape_tiles(long num_rows) {
    const long above = num_rows < TILE_ROWS ? num_rows : TILE_ROWS, below = num_rows - above;
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        const int is_below = tile == 2 || tile == 3 || tile == 5;
        shapes.bytes_of_row[tile] = 64;
        shapes.rows[tile] = tile >= 6 ? 16 : is_below ? (below ? below : 1) : above;
    }
    _tile_loadconfig(&shapes);
}

/* A tile of sums, of `count` rows from `first` on. */
static inline void write_tile(const struct product *a, const float *sums, long first, long count, long begin) {
    for (long row = 0; row < count; row++) write_outputs(a, sums + row * 16, first + row, begin, 16);
}

/* 32 outputs (16 if not `wide`) from `begin` on, of `count` rows from `first` on, more than 16 if `tall`. */
static inline __attribute__((always_inline)) void multiply_tiles(const struct product *a, long begin, long first,
                                                                  long count, const int wide, const int tall) {
    const element *weights = a->weight + begin / a->width * a->width * a->padded_inputs + begin % a->width * 2;
    const element *x = (const element *)a->x + first * a->num_inputs;
    const long x_stride = a->num_inputs * sizeof(element), weight_stride = a->width * 4;
    float sums[4][16 * 16];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long i = 0; i < a->num_inputs; i += TILE_INPUTS, weights += TILE_INPUTS * a->width) {
        for (long line = 0; line < 16; line++) {
            __builtin_prefetch((const char *)weights + line * weight_stride + 4 * AHEAD);
            if (wide) __builtin_prefetch((const char *)weights + line * weight_stride + 64 + 4 * AHEAD);
        }
        _tile_loadd(4, x + i, x_stride);
        _tile_loadd(6, weights, weight_stride);
        _tile_dpbf16ps(0, 4, 6);
        if (wide) {
            _tile_loadd(7, weights + 32, weight_stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (tall) {
            _tile_loadd(5, x + TILE_ROWS * a->num_inputs + i, x_stride);
            _tile_dpbf16ps(2, 5, 6);
            if (wide) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    const long above = tall ? TILE_ROWS : count, below = count - above;
    write_tile(a, sums[0], first, above, begin);
    write_tile(a, sums[2], first + TILE_ROWS, below, begin);
    if (wide) {
        write_tile(a, sums[1], first, above, begin + 16);
        write_tile(a, sums[3], first + TILE_ROWS, below, begin + 16);
    }
}

static long num_tall_groups(const struct product *a) { return (a->num_rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS); }

/* Groups of rows meet a column one after the other, as in `multiply_rows`. */
static void multiply_in_tiles(const void *arguments, long unit) {
    const struct product *a = arguments;
    const long begin = unit / num_tall_groups(a) * a->width, first = unit % num_tall_groups(a) * 2 * TILE_ROWS;
    const long count = smaller(a->num_rows - first, 2 * TILE_ROWS);
    const int tall = count > TILE_ROWS;
    shape_tiles(count);
    long output = 0;
    for (; output + 32 <= a->width; output += 32)
        if (tall) multiply_tiles(a, begin + output, first, count, 1, 1);
        else multiply_tiles(a, begin + output, first, count, 1, 0);
    if (output < a->width) {
        if (tall) multiply_tiles(a, begin + output, first, count, 0, 1);
        else multiply_tiles(a, begin + output, first, count, 0, 0);
    }
    _tile_release();
}

/* Linux lets a process use tiles once it has asked. */
static int may_use_tiles(void) {
    static int answer = -1;
    if (answer < 0) answer = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return answer;
}
#endif

/* The most rows for which tiles keep up with oneDNN, whose order is one for few rows (measured on two cores of an
   Intel Xeon: with 32 rows they take half the time, with 128 as long); 0 where there are none. */
long most_tiled_rows(void) {
#ifdef __AMX_BF16__
    if (may_use_tiles()) return 4 * TILE_ROWS;
#endif
    return 0;
}

/* x W^T + b of rows with whole tiles of inputs, which should be few. A row gets the same bits among any others. */
void product_in_tiles(const struct product *a) {
#ifdef __AMX_BF16__
    share(multiply_in_tiles, a, (a->num_outputs + a->width - 1) / a->width * num_tall_groups(a), num_tall_groups(a));
#else
    (void)a;
#endif
}
#endif

/* ── product in float32 ────────────────────────────────────────────────────────────────────── */

/* Not with AVX-512, where nobody has measured it and oneDNN has wider registers. */
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
enum { BLOCK_ROWS = 6 }; /* their sums, and what is multiplied, fill the registers */
enum { WIDTH = 2 * LANES };
/* The rows of a group stay in the second cache while it meets some columns, and a chunk of a column in the first. */
enum { GROUP_BLOCKS = 6, GROUP_COLUMNS = 4, CHUNK_INPUTS = 512 };
typedef floats unaligned_floats __attribute__((aligned(4), may_alias));
typedef words unaligned_words __attribute__((aligned(4), may_alias));

/* sum + weights * x, where sum stays in its register: compilers move it to others, and run out of them. */
static inline floats plus_product(floats sum, floats weights, floats x) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
    return sum;
}

/* The first number of each pair. */
static inline floats lower(words pairs) { return (floats)(pairs << 16); }

/* The second one, by shifts: a mask would take a register. */
static inline floats upper(words pairs) {
    __asm__("vpsrld $16, %1, %0" : "=x"(pairs) : "x"(pairs));
    return (floats)(pairs << 16);
}

static inline floats everywhere(float x) { return (floats)_mm256_set1_ps(x); }

/* Sums of up to BLOCK_ROWS rows for one column, or of fewer rows for more columns. */
struct block {
    floats left[BLOCK_ROWS], right[BLOCK_ROWS];
};

/* Add one input of each row, `stride` apart, times its weights; the sums of these rows are from `first` on. */
static inline __attribute__((always_inline)) void add_input(struct block *sums, int first, const float *x, long stride,
                                                            floats left, floats right, const int num_rows) {
#pragma GCC unroll 6
    for (int row = 0; row < num_rows; row++) {
        const floats input = everywhere(x[row * stride]);
        sums->left[first + row] = plus_product(sums->left[first + row], left, input);
        sums->right[first + row] = plus_product(sums->right[first + row], right, input);
    }
}

/* sums += x W^T of some rows and columns, over some inputs. Rows of `sums` are `stride` apart. */
static inline __attribute__((always_inline)) void add_products(const struct product *a, const float *x,
                                                               const uint16_t *column, long num_inputs, float *sums,
                                                               long stride, const int num_rows, const int num_columns) {
    const uint32_t *weights = (const uint32_t *)column;
    const long x_stride = a->num_inputs, column_stride = a->padded_inputs * WIDTH / 2;
    struct block block;
#pragma GCC unroll 6
    for (int i = 0; i < num_rows * num_columns; i++) block.left[i] = block.right[i] = (floats){0};
    for (long i = 0; i < num_inputs; i += 2, weights += WIDTH) {
#pragma GCC unroll 4
        for (int c = 0; c < num_columns; c++) {
            const unaligned_words *left = (const unaligned_words *)(weights + c * column_stride), *right = left + 1;
            __builtin_prefetch(weights + c * column_stride + AHEAD);
            add_input(&block, c * num_rows, x + i, x_stride, lower(*left), lower(*right), num_rows);
            if (i + 1 == num_inputs) continue;
            __asm__ volatile("" : : : "memory"); /* read them again: registers for both halves are not left */
            add_input(&block, c * num_rows, x + i + 1, x_stride, upper(*left), upper(*right), num_rows);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < num_rows * num_columns; i++) {
        float *place = sums + i % num_rows * stride + i / num_rows * WIDTH;
        *(unaligned_floats *)place += block.left[i];
        *(unaligned_floats *)(place + LANES) += block.right[i];
    }
}

/* The same with a kernel for each number of rows, and how many columns it took: at most `num_columns`, and more
   than one for so few rows that the processor would wait for sums and memory. */
static long add_block(const struct product *a, const float *x, const uint16_t *column, long num_inputs, float *sums,
                      long stride, long num_rows, long num_columns) {
    switch (num_rows) {
#define KERNEL(rows, columns) \
    case rows: \
        if (num_columns >= columns) { \
            add_products(a, x, column, num_inputs, sums, stride, rows, columns); \
            return columns; \
        } \
        add_products(a, x, column, num_inputs, sums, stride, rows, 1); \
        return 1;
        KERNEL(1, 4) KERNEL(2, 2) KERNEL(3, 2) KERNEL(4, 1) KERNEL(5, 1) KERNEL(6, 1)
#undef KERNEL
    }
    __builtin_unreachable();
}

static long num_blocks(const struct product *a) { return (a->num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

/* Rows are shared out evenly. */
static long start_of_block(const struct product *a, long block) { return a->num_rows * block / num_blocks(a); }

static long num_columns(const struct product *a) { return (a->num_outputs + WIDTH - 1) / WIDTH; }

/* One block of rows times some columns. */
static void multiply_block(const struct product *a, long column, long end_column) {
    float sums[BLOCK_ROWS * GROUP_COLUMNS * WIDTH] = {0};
    const long stride = (end_column - column) * WIDTH;
    for (long c = column, taken; c < end_column; c += taken)
        for (long i = 0; i < a->num_inputs; i += CHUNK_INPUTS)
            taken = add_block(a, (const float *)a->x + i, a->weight + (c * a->padded_inputs + i) * WIDTH,
                              smaller(CHUNK_INPUTS, a->num_inputs - i), sums + (c - column) * WIDTH, stride,
                              a->num_rows, end_column - c);
    for (long row = 0; row < a->num_rows; row++) write_outputs(a, sums + row * stride, row, column * WIDTH, stride);
}

/* Some blocks of rows times some columns. */
static void multiply_blocks(const struct product *a, long block, long end_block, long column, long end_column) {
    float sums[GROUP_BLOCKS * BLOCK_ROWS * GROUP_COLUMNS * WIDTH];
    const long first = start_of_block(a, block), end = start_of_block(a, end_block);
    const long stride = (end_column - column) * WIDTH;
    memset(sums, 0, (end - first) * stride * sizeof(float));
    for (long i = 0; i < a->num_inputs; i += CHUNK_INPUTS) {
        const long num_inputs = smaller(CHUNK_INPUTS, a->num_inputs - i);
        for (long c = column; c < end_column; c++) {
            const uint16_t *weights = a->weight + (c * a->padded_inputs + i) * WIDTH;
            for (long b = block; b < end_block; b++) {
                const long row = start_of_block(a, b), num_rows = start_of_block(a, b + 1) - row;
                add_block(a, (const float *)a->x + row * a->num_inputs + i, weights, num_inputs,
                          sums + (row - first) * stride + (c - column) * WIDTH, stride, num_rows, 1);
            }
        }
    }
    for (long row = first; row < end; row++)
        write_outputs(a, sums + (row - first) * stride, row, column * WIDTH, stride);
}

static long num_column_groups(const struct product *a) { return (num_columns(a) + GROUP_COLUMNS - 1) / GROUP_COLUMNS; }

static void multiply_group(const void *arguments, long unit) {
    const struct product *a = arguments;
    const long block = unit / num_column_groups(a) * GROUP_BLOCKS, column = unit % num_column_groups(a) * GROUP_COLUMNS;
    const long end_column = smaller(column + GROUP_COLUMNS, num_columns(a));
    if (num_blocks(a) == 1)
        multiply_block(a, column, end_column);
    else
        multiply_blocks(a, block, smaller(block + GROUP_BLOCKS, num_blocks(a)), column, end_column);
}

/* The width of columns for `product_of_floats`; 0 where there is none. */
long width_for_floats(void) { return WIDTH; }

/* x W^T + b of any number of rows. Inputs are summed up in order within chunks, and the chunks in order, so a row
   gets the same bits among any others, and long sums stay exact. */
void product_of_floats(const struct product *a) {
    share(multiply_group, a, num_column_groups(a) * ((num_blocks(a) + GROUP_BLOCKS - 1) / GROUP_BLOCKS), 1);
}
#else
long width_for_floats(void) { return 0; }
void product_of_floats(const struct product *a) { (void)a; }
#endif

/* ── norm ──────────────────────────────────────────────────────────────────────────────────── */

struct norm {
    const element *x, *residual, *weight; /* residual and total: NULL for a plain norm */
    element *out, *total;
    long outer, inner, stride_outer, stride_inner, size;
    float epsilon;
};

static void norm_row(const void *arguments, long row) {
    const struct norm *a = arguments;
    const element *x = a->x + row / a->inner * a->stride_outer + row % a->inner * a->stride_inner;
    element *out = a->out + row * a->size;
    if (a->residual) {
        const element *residual = a->residual + row * a->size;
        element *total = a->total + row * a->size;
        for (long i = 0; i < a->size; i++) total[i] = narrow(widen(x[i]) + widen(residual[i]));
        x = total;
    }
    float squares = 0;
    for (long i = 0; i < a->size; i++) squares += widen(x[i]) * widen(x[i]);
    float factor = 1.0f / __builtin_sqrtf(squares / (float)a->size + a->epsilon);
    for (long i = 0; i < a->size; i++) out[i] = narrow(widen(a->weight[i]) * rounded(widen(x[i]) * factor));
}

/* Rows are `outer` by `inner`; residual, out and total are contiguous. */
void rms_norm(const struct norm *a) {
    share(norm_row, a, a->outer * a->inner, grain_of(a->size));
}

/* ── gated activation ──────────────────────────────────────────────────────────────────────── */

struct gate {
    const element *gate_up;
    element *out;
    long num_rows, size;
};

static void gate_row(const void *arguments, long row) {
    const struct gate *a = arguments;
    const element *gate = a->gate_up + row * 2 * a->size, *up = gate + a->size;
    element *out = a->out + row * a->size;
    for (long i = 0; i < a->size; i++) {
        float x = widen(gate[i]);
        float silu = x / (1.0f + power_of_two(-x * LOG2_E));
        out[i] = narrow(rounded(silu) * widen(up[i]));
    }
}

/* silu(gate_up[:, :size]) * gate_up[:, size:] */
void gated_silu(const struct gate *a) { share(gate_row, a, a->num_rows, grain_of(2 * a->size)); }

/* ── rotation ──────────────────────────────────────────────────────────────────────────────── */

struct rotation {
    const element *x, *cosines, *sines;
    element *out;
    long num_tokens, heads, stride_token, stride_head, head_dim, half, stride_angle;
};

static void rotate_token(const void *arguments, long token) {
    const struct rotation *a = arguments;
    const element *cosines = a->cosines + token * a->stride_angle, *sines = a->sines + token * a->stride_angle;
    for (long head = 0; head < a->heads; head++) {
        const element *x = a->x + token * a->stride_token + head * a->stride_head;
        element *out = a->out + (token * a->heads + head) * a->head_dim;
        for (long i = 0; i < a->half; i++) {
            float first = widen(x[i]), second = widen(x[i + a->half]);
            float cosine = widen(cosines[i]), sine = widen(sines[i]);
            out[i] = narrow(rounded(first * cosine) - rounded(second * sine));
            out[i + a->half] = narrow(rounded(second * cosine) + rounded(first * sine));
        }
        for (long i = 2 * a->half; i < a->head_dim; i++) out[i] = x[i];
    }
}

void rotate(const struct rotation *a) {
    share(rotate_token, a, a->num_tokens, grain_of(a->heads * a->head_dim));
}

/* ── keys and values ───────────────────────────────────────────────────────────────────────── */

struct caches {
    element *keys, *values;
    long stride_page, stride_token, stride_head, page_size, heads, head_dim;
};

struct stored {
    const struct caches *caches;
    const element *k, *v;
    const int64_t *slots;
    long num_tokens, stride_kt, stride_kh, stride_vt, stride_vh;
};

static void store_token(const void *arguments, long token) {
    const struct stored *a = arguments;
    const struct caches *c = a->caches;
    long slot = a->slots[token];
    long target = slot / c->page_size * c->stride_page + slot % c->page_size * c->stride_token;
    for (long head = 0; head < c->heads; head++, target += c->stride_head) {
        memcpy(c->keys + target, a->k + token * a->stride_kt + head * a->stride_kh, c->head_dim * sizeof(element));
        memcpy(c->values + target, a->v + token * a->stride_vt + head * a->stride_vh, c->head_dim * sizeof(element));
    }
}

void store(const struct stored *a) {
    share(store_token, a, a->num_tokens, grain_of(2 * a->caches->heads * a->caches->head_dim));
}

/* ── attention of one query a row ──────────────────────────────────────────────────────────── */

enum { TILE = 32 }; /* keys whose scores are taken together */

struct decode {
    const struct caches *caches;
    const element *q;
    const int32_t *page_table, *lengths;
    element *out;
    long num_rows, stride_qt, stride_qh, stride_table, group, window; /* window 0: none */
    float scale;
};

static inline const element *at(const struct caches *c, const element *cache, const int32_t *table, long head,
                                long position) {
    return cache + table[position / c->page_size] * c->stride_page + position % c->page_size * c->stride_token +
           head * c->stride_head;
}

static inline __attribute__((always_inline)) void attend(const struct decode *a, long index, const long size,
                                                          const long group) {
    const struct caches *c = a->caches;
    const long row = index / c->heads, head = index % c->heads;
    const int32_t *table = a->page_table + row * a->stride_table;
    float query[group * size], sum[group * size], line[size];
    float peak[group], total[group], weights[group][TILE];
    for (long g = 0; g < group; g++) {
        const element *q = a->q + row * a->stride_qt + (head * group + g) * a->stride_qh;
        for (long i = 0; i < size; i++) query[g * size + i] = widen(q[i]) * (a->scale * LOG2_E);
        peak[g] = -__builtin_inff();
        total[g] = 0;
    }
    memset(sum, 0, sizeof sum);

    const long length = a->lengths[row];
    const long begin = a->window && length > a->window ? length - a->window : 0;
    for (long first = begin; first < length; first += TILE) {
        const long count = length - first < TILE ? length - first : TILE;
        for (long t = 0; t < count; t++) {
            const element *k = at(c, c->keys, table, head, first + t);
            for (long i = 0; i < size; i++) line[i] = widen(k[i]);
            for (long g = 0; g < group; g++) {
                float score = 0;
                for (long i = 0; i < size; i++) score += query[g * size + i] * line[i];
                weights[g][t] = score;
            }
        }
        for (long g = 0; g < group; g++) {
            float highest = peak[g], fade, added = 0;
            for (long t = 0; t < count; t++) highest = weights[g][t] > highest ? weights[g][t] : highest;
            fade = power_of_two(peak[g] - highest);
            for (long t = 0; t < count; t++) {
                weights[g][t] = power_of_two(weights[g][t] - highest);
                added += weights[g][t];
            }
            for (long i = 0; i < size; i++) sum[g * size + i] *= fade;
            total[g] = total[g] * fade + added;
            peak[g] = highest;
        }
        for (long t = 0; t < count; t++) {
            const element *v = at(c, c->values, table, head, first + t);
            for (long i = 0; i < size; i++) line[i] = widen(v[i]);
            for (long g = 0; g < group; g++)
                for (long i = 0; i < size; i++) sum[g * size + i] += weights[g][t] * line[i];
        }
    }
    for (long g = 0; g < group; g++) {
        element *out = a->out + (row * c->heads * group + head * group + g) * size;
        for (long i = 0; i < size; i++) out[i] = narrow(sum[g * size + i] / total[g]);
    }
}

/* Loops of a length that the compiler knows are several times as fast. */
static void decode_head(const void *arguments, long index) {
    const struct decode *a = arguments;
    const long size = a->caches->head_dim, group = a->group;
    if (size == 64 && group == 3) attend(a, index, 64, 3);
    else if (size == 64 && group == 7) attend(a, index, 64, 7);
    else if (size == 64) attend(a, index, 64, group);
    else if (size == 128) attend(a, index, 128, group);
    else attend(a, index, size, group);
}

/* Each row's last token attends to its pages; `out` [rows, H, D] is contiguous. */
void decode(const struct decode *a) { share(decode_head, a, a->num_rows * a->caches->heads, 1); }

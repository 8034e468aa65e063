// Products of matrices whose numbers are first rounded to whole numbers of 16 bits, which this processor multiplies in pairs, twice
// as many in a cycle as float32 numbers, and adds up exactly.
//
// A vector (a row of the left matrix, a column of the right one) has one scale for every BLOCK of the depth: the smallest for which
// the whole numbers of the block have 16 bits and a norm of at most TOP. By Cauchy and Schwarz a sum of products of two such blocks
// is less than 2^31. The rounding errors of a block of n numbers are about sqrt(n / 12) / TOP of its norm, 9e-5 for 192; those of
// rounding to bfloat16 are 2e-3. Sums of blocks are float32.
//
// A sum runs over the depth in one order, whatever the number of rows and threads, so that a row's result depends on that row alone,
// to the bit. int16_products.py says what the arguments are.

#include "int16.h"
#include "panels.h"

#ifdef __AVX512VNNI__

namespace {

constexpr int64_t BLOCK = 192;  // numbers of a vector with one scale; a multiple of LANES
constexpr int64_t MOST_ROUNDED = 1 << 23;  // whole numbers of rows that are kept at a time

int64_t padded(int64_t depth) { return (depth + LANES - 1) / LANES * LANES; }
int64_t blocks_of(int64_t depth) { return (depth + BLOCK - 1) / BLOCK; }

// Whole numbers of a block whose numbers are side by side, with zeros up to `width`. Returns: their scale.
template <class T>
float round_block(const T *from, int64_t count, int64_t width, int16_t *to) {
    alignas(64) float kept[BLOCK];
    Words most = {};
    for (int64_t k = 0; k < width; k += LANES) {
        Lanes x = k + LANES <= count ? load(from + k) : load_part(from + k, count - k);
        most = larger(most, x);
        store(x, kept + k);
    }
    uint32_t top = top_of(most);
    float inverse = Power(top).inverse;
    Lanes squares = {};
    for (int64_t k = 0; k < width; k += LANES) {
        Lanes share = load(kept + k) * inverse;
        squares += share * share;
        store(share, kept + k);
    }
    Scale found(top, sum(squares));
    for (int64_t k = 0; k < width; k += LANES)
        _mm256_storeu_si256((__m256i *)(to + k), whole(load(kept + k) * found.factor));
    return found.scale;
}

// A panel of vectors, or the rest of it from a block on: whole numbers [depth / 2][PANEL][2] and scales [blocks][PANEL].
struct Panel {
    int16_t *numbers;
    float *scales;

    Panel block(int64_t number) const { return {numbers + number * BLOCK * PANEL, scales + number * PANEL}; }
};

// Where each panel of a packed matrix begins.
struct Packed {
    int16_t *numbers;
    float *scales;
    int64_t depth;

    Panel panel(int64_t number) const {
        return {numbers + number * PANEL * padded(depth), scales + number * PANEL * blocks_of(depth)};
    }
};

// Packs a block of up to PANEL vectors that are rows in memory, `stride` numbers apart.
template <class T>
void pack_rows(const T *from, int64_t stride, int64_t vectors, int64_t count, int64_t width, Panel to) {
    alignas(64) int16_t numbers[BLOCK] = {};
    for (int64_t vector = 0; vector < PANEL; vector++) {
        bool there = vector < vectors;
        to.scales[vector] = there ? round_block(from + vector * stride, count, width, numbers) : 0;
        if (!there) std::fill_n(numbers, width, 0);
        for (int64_t k = 0; k < width; k += 2) std::memcpy(to.numbers + k * PANEL + vector * 2, numbers + k, 4);
    }
}

// Packs a block of up to PANEL vectors that are columns in memory, of rows that are `stride` numbers apart.
template <class T>
void pack_columns(const T *from, int64_t stride, int64_t vectors, int64_t count, int64_t width, Panel to) {
    for (int64_t left = 0; left < PANEL; left += LANES) {
        int64_t there = std::clamp<int64_t>(vectors - left, 0, LANES);
        Lanes kept[BLOCK], inverse, factors, squares = {};
        Words most = {};
        for (int64_t k = 0; k < count; k++) {
            const T *place = from + k * stride + left;
            kept[k] = there == LANES ? load(place) : load_part(place, there);
            most = larger(most, kept[k]);
        }
        for (int lane = 0; lane < LANES; lane++) inverse[lane] = Power(most[lane]).inverse;
        for (int64_t k = 0; k < count; k++) {
            kept[k] *= inverse;
            squares += kept[k] * kept[k];
        }
        for (int lane = 0; lane < LANES; lane++) {
            Scale found(most[lane], squares[lane]);
            factors[lane] = found.factor, to.scales[left + lane] = found.scale;
        }
        for (int64_t k = 0; k < width; k += 2) {
            Lanes first = k < count ? kept[k] * factors : Lanes{}, second = k + 1 < count ? kept[k + 1] * factors : Lanes{};
            _mm512_storeu_si512(to.numbers + k * PANEL + left * 2, pairs_of(first, second));
        }
    }
}

// Rows on the left, from one row and block on: pairs of whole numbers, and scales, by their distances in memory.
struct Rows {
    const int16_t *numbers;
    const float *scales;
    int64_t row_pairs, pair_pairs;  // from a row to the next, from a pair to the next, in pairs
    int64_t row_scales, block_scales;

    Rows from(int64_t row, int64_t block = 0) const {
        Rows later = *this;
        later.numbers += 2 * row * row_pairs + block * BLOCK * pair_pairs;
        later.scales += row * row_scales + block * block_scales;
        return later;
    }
};

// Adds to sums[row][column], for ROWS rows and one panel, the products of a block, and fetches LINES lines at each of its steps.
template <int LINES, int ROWS>
inline __attribute__((always_inline)) void multiply(
    const Rows &rows, Panel panel, int64_t width, bool first, float *sums, const char *ahead) {
    __m512i found[ROWS][WIDE];
    ALL_AT_ONCE
    for (int row = 0; row < ROWS; row++)
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) found[row][block] = _mm512_setzero_si512();
    const int16_t *pairs = rows.numbers, *numbers = panel.numbers;
    int64_t next_row = 2 * rows.row_pairs, next_pair = 2 * rows.pair_pairs;
    for (int64_t k = 0; k < width; k += 2, pairs += next_pair, numbers += 2 * PANEL) {
        for (int line = 0; line < LINES; line++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);  // into the second cache
        __m512i columns[WIDE];
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) columns[block] = _mm512_loadu_si512(numbers + block * 2 * LANES);
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++) {
            int32_t pair;
            std::memcpy(&pair, pairs + row * next_row, sizeof pair);
            __m512i both = _mm512_set1_epi32(pair);
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) add_pairs(found[row][block], both, columns[block]);
        }
    }
    ALL_AT_ONCE
    for (int block = 0; block < WIDE; block++) {
        __m512 scale = (__m512)load(panel.scales + block * LANES);
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++) {
            float *place = sums + row * PANEL + block * LANES;
            __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[row * rows.row_scales]));
            __m512 whole_sum = _mm512_cvtepi32_ps(found[row][block]);
            __m512 before = first ? _mm512_setzero_ps() : (__m512)load(place);
            store((Lanes)_mm512_fmadd_ps(whole_sum, both, before), place);
        }
    }
}

// Sums of up to BAND rows with one panel.
void sums_of_panel(const Rows &rows, int64_t count, Panel panel, int64_t depth, float *sums) {
    constexpr int64_t STEP_LINES = PANEL * 2 * sizeof(int16_t) / LINE;
    int64_t all = padded(depth);
    for (int64_t number = 0; number < blocks_of(depth); number++) {
        int64_t width = std::min(BLOCK, all - number * BLOCK);
        Panel here = panel.block(number);
        const char *next = (const char *)(here.numbers + width * PANEL);
        in_groups(count, TALL, STEP_LINES, width / 2, next, [&](int64_t each, int64_t begin, int64_t some, auto ahead) {
            Rows group = rows.from(begin, number);
            float *place = sums + begin * PANEL;
            with_rows<TALL>(some, [&](auto constant) {
                constexpr int ROWS = constant.value;
                if (each == 0)
                    multiply<0, ROWS>(group, here, width, number == 0, place, ahead);
                else if (each == 1)
                    multiply<1, ROWS>(group, here, width, number == 0, place, ahead);
                else
                    multiply<2, ROWS>(group, here, width, number == 0, place, ahead);
            });
        });
    }
}

// As int16_products.py has it.
struct Product {
    const void *x;
    int16_t *packed;
    float *scales;
    const float *biases;
    int64_t depth, columns;
    void *y;

    Packed right() const { return {packed, scales, depth}; }
    bool parallel(int64_t rows) const { return rows * columns * depth >= MANY_WEIGHTS; }
};

// Of rows from `first` to `last`.
template <class T, class Y>
void product_of(const Product &all, int64_t first, int64_t last, int threads) {
    int64_t depth = all.depth, width = padded(depth), blocks = blocks_of(depth), rows = last - first;
    thread_local std::vector<int16_t> kept;
    thread_local std::vector<float> kept_scales;
    if (int64_t(kept.size()) < rows * width) kept.resize(rows * width);
    if (int64_t(kept_scales.size()) < rows * blocks) kept_scales.resize(rows * blocks);
    int16_t *numbers = kept.data();
    float *scales = kept_scales.data();
    const T *x = (const T *)all.x + first * depth;
    Y *y = (Y *)all.y + first * all.columns;
#pragma omp parallel for num_threads(threads) if (rows * depth >= MANY_WEIGHTS)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t block = 0; block < blocks; block++) {
            int64_t k = block * BLOCK, count = std::min(BLOCK, depth - k), there = std::min(BLOCK, width - k);
            scales[row * blocks + block] = round_block(x + row * depth + k, count, there, numbers + row * width + k);
        }
    Rows left = {numbers, scales, width / 2, 1, blocks, 1};
    int64_t bands = (rows + BAND - 1) / BAND;
    auto edge = [=](int64_t band) { return rows * band / bands; };
    divide(bands, panels_of(all.columns), all.parallel(rows), threads, edge, [=](int64_t panel, int64_t, int64_t top, int64_t count) {
        alignas(64) float sums[BAND * PANEL];
        sums_of_panel(left.from(top), count, all.right().panel(panel), depth, sums);
        write(sums, count, nullptr, all.biases, panel * PANEL, all.columns, y + top * all.columns);
    });
}

template <class T, class Y>
void product(const Product &all, int64_t rows, int threads) {
    int64_t parts = rows * padded(all.depth) / MOST_ROUNDED + 1;
    for (int64_t part = 0; part < parts; part++)
        product_of<T, Y>(all, rows * part / parts, rows * (part + 1) / parts, threads);
}

// Of packed rows, whose panels are the bands.
template <class Y>
void packed_product(const Product &all, const Packed &rows_on_the_left, int64_t rows, int threads) {
    auto edge = [=](int64_t band) { return std::min(rows, band * PANEL); };
    int64_t bands = panels_of(rows), panels = panels_of(all.columns);
    divide(bands, panels, all.parallel(rows), threads, edge, [=](int64_t panel, int64_t first, int64_t top, int64_t count) {
        alignas(64) float sums[PANEL * PANEL];
        Panel band = rows_on_the_left.panel(first / PANEL);
        Rows left = {band.numbers, band.scales, 1, PANEL, 1, PANEL};
        sums_of_panel(left.from(top - first), count, all.right().panel(panel), all.depth, sums);
        write(sums, count, nullptr, all.biases, panel * PANEL, all.columns, (Y *)all.y + top * all.columns);
    });
}

template <class T>
void pack(const T *from, int64_t stride, bool columns, int64_t vectors, const Packed &to, int threads) {
    int64_t width = padded(to.depth), blocks = blocks_of(to.depth), panels = panels_of(vectors);
#pragma omp parallel for num_threads(threads) collapse(2) if (vectors * width >= MANY_WEIGHTS)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t block = 0; block < blocks; block++) {
            int64_t k = block * BLOCK, left = panel * PANEL, there = std::min(PANEL, vectors - left);
            int64_t count = std::min(BLOCK, to.depth - k), wide = std::min(BLOCK, width - k);
            Panel here = to.panel(panel).block(block);
            if (columns)
                pack_columns(from + k * stride + left, stride, there, count, wide, here);
            else
                pack_rows(from + left * stride + k, stride, there, count, wide, here);
        }
}

}  // namespace

extern "C" int64_t panel_columns() { return PANEL; }
extern "C" int64_t padded_depth(int64_t depth) { return padded(depth); }
extern "C" int64_t scales_of_depth(int64_t depth) { return blocks_of(depth); }

#define FUNCTIONS(T, NAME)                                                                                                       \
    extern "C" void pack_##NAME(const T *from, int64_t stride, int columns, int64_t vectors, const Packed *to, int threads) {    \
        pack<T>(from, stride, columns, vectors, *to, threads);                                                                   \
    }                                                                                                                            \
    extern "C" void product_##NAME(const Product *all, int64_t rows, int threads) { product<T, T>(*all, rows, threads); }        \
    extern "C" void packed_product_##NAME(const Product *all, const Packed *left, int64_t rows, int threads) {                   \
        packed_product<T>(*all, *left, rows, threads);                                                                           \
    }

FUNCTIONS(float, float32)
FUNCTIONS(bfloat16, bfloat16)
extern "C" void product_wide(const Product *all, int64_t rows, int threads) { product<bfloat16, float>(*all, rows, threads); }
#endif

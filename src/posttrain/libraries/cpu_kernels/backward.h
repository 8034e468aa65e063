// Products of the backward pass of attention, of up to ROWS_AT_ONCE queries: as factors of attention.h's forms, or as whole numbers of
// 16 bits. Products of rows with keys are sums over the head's numbers; gradients of queries are sums over keys; gradients of keys and
// values are sums over the rows ("across").
#pragma once

#include "attention.h"

namespace {

#define APART __attribute__((noinline))  // or compilers do not keep the sums of a product in registers
constexpr int64_t ROWS_AT_ONCE = 16 * TALL;  // queries whose weights are kept together

// Calls the function object for as many LANES of `count` numbers as a product has, with the first of them and their number as a constant.
template <class Work>
inline __attribute__((always_inline)) void in_blocks(int64_t count, Work work) {
    int64_t blocks = count / LANES, block = 0;
    for (; block + BROAD <= blocks; block += BROAD) work(block * LANES, std::integral_constant<int, BROAD>{});
    switch (blocks - block) {
        case 3: work(block * LANES, std::integral_constant<int, 3>{}); break;
        case 2: work(block * LANES, std::integral_constant<int, 2>{}); break;
        case 1: work(block * LANES, std::integral_constant<int, 1>{}); break;
    }
}

// Calls the function object for groups of up to TALL of `count` rows, with the first of them and their number as a constant.
template <int ROWS = TALL, class Work>
inline __attribute__((always_inline)) void with_rows_of(int64_t first, int64_t rows, Work work) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return with_rows_of<ROWS - 1>(first, rows, work);
    work(first, std::integral_constant<int, ROWS>{});
}

template <class Work>
inline __attribute__((always_inline)) void in_groups(int64_t count, Work work) {
    int64_t groups = (count + TALL - 1) / TALL;
    for (int64_t group = 0; group < groups; group++) {
        int64_t first = count * group / groups;
        with_rows_of(first, count * (group + 1) / groups - first, work);
    }
}

// Two rows of LANES numbers as factors: pairs side by side where these are multiplied at once, else `apart` numbers apart.
template <class T>
inline __attribute__((always_inline)) void put_two(Lanes one, Lanes other, typename Form<T>::Factor *to, int64_t apart) {
    if constexpr (Form<T>::STEP == 1) {
        store(one, to), store(other, to + apart);
    } else {
        typename Form<T>::Factor halves[2][LANES];
        store(one, halves[0]), store(other, halves[1]);
        Halves low, high;
        std::memcpy(&low, halves[0], sizeof low), std::memcpy(&high, halves[1], sizeof high);
        Words pairs = __builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16;
        std::memcpy((void *)to, &pairs, sizeof pairs);
    }
}

template <class T>
struct FactoredRows {
    typedef typename Form<T>::Factor Factor;
    typedef Tiled<T> Past;
    static constexpr int STEP = Form<T>::STEP;

    int64_t dim, columns = 0;
    // Themselves and incoming gradients, [row][dim], and as factors whose rows are summed over, [row / STEP][dim][STEP].
    std::vector<Factor> queries, grads, queries_across, grads_across;
    std::vector<Factor> of_scores;                         // of TALL queries, [row][column]
    std::vector<Factor> weights_across, of_scores_across;  // [row / STEP][column][STEP]

    explicit FactoredRows(int64_t head_dim) : dim(head_dim) {
        for (auto *each : {&queries, &grads, &queries_across, &grads_across}) each->resize(ROWS_AT_ONCE * dim);
    }

    // For so many columns, those of a prompt's keys and then of a part's own.
    void begin(int64_t count) {
        columns = count;
        of_scores.resize(TALL * columns);
        weights_across.resize(ROWS_AT_ONCE * columns), of_scores_across.resize(ROWS_AT_ONCE * columns);
    }

    // Two queries, from an even row on, and their incoming gradients.
    void put(int64_t row, const T *const (&query)[2], const T *const (&grad)[2]) {
        auto both = [&](const T *const (&from)[2], std::vector<Factor> &rows, std::vector<Factor> &rows_across) {
            for (int64_t at = row * dim, i = 0; i < dim; i += LANES) {
                Lanes one = load(from[0] + i), other = load(from[1] + i);
                store(one, &rows[at + i]), store(other, &rows[at + dim + i]);
                put_two<T>(one, other, &rows_across[at + i * STEP], dim);
            }
        };
        both(query, queries, queries_across), both(grad, grads, grads_across);
    }

    // lines[row][column] = the products of TALL queries from `row` on, or of incoming gradients, with `count` keys or values
    void score(int64_t row, const Past &past, int64_t count, float *lines) { score_rows(&queries[row * dim], past, count, lines); }
    void score_grads(int64_t row, const Past &past, int64_t count, float *lines) { score_rows(&grads[row * dim], past, count, lines); }

    // Weights and gradients of scores of TALL queries from `row` on, each line `columns` long, of the first `count`
    // columns: for the sums below.
    void keep(int64_t row, int64_t count, const float *weights, const float *slopes) {
        for (int64_t i = 0; i < TALL * columns; i += columns)
            for (int64_t k = i; k < i + count; k += LANES) store(load(slopes + k), &of_scores[k]);
        for (int i = 0; i < TALL; i += 2)
            for (int64_t k = 0; k < count; k += LANES) {
                const float *weight = weights + i * columns + k, *slope = slopes + i * columns + k;
                int64_t to = (row + i) * columns + k * STEP;
                put_two<T>(load(weight), load(weight + columns), &weights_across[to], columns);
                put_two<T>(load(slope), load(slope + columns), &of_scores_across[to], columns);
            }
    }

    // sums[row][dim] += the sums over keys, whose columns begin at `begin`, of the kept gradients of scores of TALL queries
    void mix(const Past &past, int64_t begin, int64_t count, float *sums) {
        in_blocks(dim, [&](int64_t i, auto wide) { mix_block<wide.value>(past, &of_scores[begin], count, i, sums + i); });
    }

    // What `rows` rows add to the gradients of keys and values, [2][dim][width], for `count` columns from `begin` on.
    void across(int64_t rows, int64_t begin, int64_t count, float *sums, int64_t width) {
        in_blocks(count, [&](int64_t k, auto wide) {
            in_groups(dim, [&](int64_t i, auto tall) {
                float *to = sums + i * width + k;
                int64_t at = (begin + k) * STEP;
                add<tall.value, wide.value>(&queries_across[i * STEP], &of_scores_across[at], rows, to, width);
                add<tall.value, wide.value>(&grads_across[i * STEP], &weights_across[at], rows, to + dim * width, width);
            });
        });
    }

   private:
    void score_rows(const Factor *rows, const Past &past, int64_t count, float *lines) {
        in_blocks(count, [&](int64_t key, auto wide) { score_block<wide.value>(rows, past, key, lines + key); });
    }

    template <int WIDE>
    APART void score_block(const Factor *rows, const Past &past, int64_t key, float *lines) {
        Lanes found[TALL][WIDE] = {};
        past.score(rows, dim, key, found);
        each(found, [&](int row, int block, Lanes &x) { store(x, lines + row * columns + block * LANES); });
    }

    template <int WIDE>
    APART void mix_block(const Past &past, const Factor *slopes, int64_t count, int64_t column, float *sums) {
        Lanes found[TALL][WIDE];
        each(found, [&](int row, int block, Lanes &x) { x = load(sums + row * dim + block * LANES); });
        past.mix(slopes, columns, 0, count, column, found);
        each(found, [&](int row, int block, Lanes &x) { store(x, sums + row * dim + block * LANES); });
    }

    template <int ROWS, int WIDE>
    APART void add(const Factor *left, const Factor *right, int64_t depth, float *sums, int64_t width) {
        Lanes found[ROWS][WIDE];
        each(found, [&](int row, int block, Lanes &x) { x = load(sums + row * width + block * LANES); });
        multiply_tiles<T>(left, STEP, dim * STEP, right, right, LANES * STEP, columns * STEP, depth, found);
        each(found, [&](int row, int block, Lanes &x) { store(x, sums + row * width + block * LANES); });
    }

    template <int ROWS, int WIDE, class Work>
    static inline __attribute__((always_inline)) void each(Lanes (&found)[ROWS][WIDE], Work work) {
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) work(row, block, found[row][block]);
    }
};

#ifdef FAST_INT16
// The same by whole numbers. Scales of the numbers that a sum runs over, of values in sums over keys and of rows in sums across, are
// part of the other factor, which has one scale for a row and SPAN keys, or for all rows and a key.
struct RoundedRows {
    typedef Rounded Past;
    static_assert(ROWS_AT_ONCE <= SPAN);

    int64_t dim, columns = 0;
    std::vector<int16_t> queries, grads;                     // [row][dim]
    std::vector<float> query_scales, grad_scales;            // [row]
    std::vector<Words> queries_across, grads_across;         // [row / 2][dim][2] numbers
    std::vector<float> scales_across, grad_scales_across;    // [row]
    std::vector<float> weights, of_scores;                   // [row][column], times the scales across
    const float *slopes = nullptr;                           // gradients of scores of the latest TALL queries
    std::vector<int16_t> line;                               // [TALL][column], of them
    std::vector<float> line_scales;                          // [TALL][column / SPAN]
    alignas(64) int16_t panel[2][ROWS_AT_ONCE * BROAD * LANES];  // [row / 2][column][2] of some columns
    Lanes panel_scales[2][BROAD];

    explicit RoundedRows(int64_t head_dim) : dim(head_dim) {
        for (auto *each : {&queries, &grads}) each->resize(ROWS_AT_ONCE * dim);
        for (auto *each : {&queries_across, &grads_across}) each->resize(ROWS_AT_ONCE * dim * sizeof(int16_t) / sizeof(Words));
        for (auto *each : {&query_scales, &grad_scales, &scales_across, &grad_scales_across}) each->resize(ROWS_AT_ONCE);
    }

    void begin(int64_t count) {
        columns = count;
        for (auto *each : {&weights, &of_scores}) each->resize(ROWS_AT_ONCE * columns);
        line.resize(TALL * columns), line_scales.resize(TALL * (columns / SPAN + 1));
    }

    template <class T>
    void put(int64_t row, const T *const (&query)[2], const T *const (&grad)[2]) {
        for (int i = 0; i < 2; i++) {
            query_scales[row + i] = round_vector(query[i], dim, dim, &queries[(row + i) * dim]);
            grad_scales[row + i] = round_vector(grad[i], dim, dim, &grads[(row + i) * dim]);
        }
        auto across = [&](const T *const (&rows)[2], std::vector<Words> &to, std::vector<float> &scales) {
            Rounded{nullptr, (int16_t *)to.data(), nullptr, scales.data(), dim, dim, 0}.put_values(row, 2, [&](int i) { return rows[i]; });
        };
        across(query, queries_across, scales_across), across(grad, grads_across, grad_scales_across);
    }

    void score(int64_t row, const Past &past, int64_t count, float *lines) {
        score_rows(&queries[row * dim], &query_scales[row], past, count, lines);
    }
    void score_grads(int64_t row, const Past &past, int64_t count, float *lines) {
        score_rows(&grads[row * dim], &grad_scales[row], past, count, lines);
    }

    void keep(int64_t row, int64_t count, const float *of_rows, const float *slopes_of_rows) {
        slopes = slopes_of_rows;
        for (int64_t i = 0; i < TALL; i++) {
            float by_grad = grad_scales_across[row + i], by_query = scales_across[row + i];
            for (int64_t k = i * columns, to = row * columns + k; k < i * columns + count; k += LANES, to += LANES)
                store(load(of_rows + k) * by_grad, &weights[to]), store(load(slopes + k) * by_query, &of_scores[to]);
        }
    }

    void mix(const Past &past, int64_t begin, int64_t count, float *sums) {
        int64_t spans = (count + SPAN - 1) / SPAN;
        for (int i = 0; i < TALL; i++)
            for (int64_t k = 0; k < count; k += SPAN) {
                const float *from = slopes + i * columns + begin + k;
                line_scales[i * spans + k / SPAN] =
                    round_weights(from, past.value_scales + k, std::min(SPAN, count - k), &line[i * columns + k]);
            }
        in_blocks(dim, [&](int64_t i, auto wide) {
            for (int64_t k = 0; k < count; k += SPAN)
                past.mix<TALL, wide.value>(
                    &line[k], columns, &line_scales[k / SPAN], spans, k, std::min(SPAN, count - k), i, sums + i, dim);
        });
    }

    void across(int64_t rows, int64_t begin, int64_t count, float *sums, int64_t width) {
        in_blocks(count, [&](int64_t k, auto wide) {
            round_columns<wide.value>(&of_scores[begin + k], rows, 0), round_columns<wide.value>(&weights[begin + k], rows, 1);
            in_groups(dim, [&](int64_t i, auto tall) {
                float *to = sums + i * width + k;
                add<tall.value, wide.value>((const int16_t *)queries_across.data() + i * 2, rows, 0, to, width);
                add<tall.value, wide.value>((const int16_t *)grads_across.data() + i * 2, rows, 1, to + dim * width, width);
            });
        });
    }

   private:
    void score_rows(const int16_t *rows, const float *scales, const Past &past, int64_t count, float *lines) {
        in_blocks(count, [&](int64_t key, auto wide) { score_block<wide.value>(rows, scales, past, key, lines + key); });
    }

    template <int WIDE>
    APART void score_block(const int16_t *rows, const float *scales, const Past &past, int64_t key, float *lines) {
        Lanes found[TALL][WIDE];
        past.score(rows, scales, key, found);
        ALL_AT_ONCE
        for (int row = 0; row < TALL; row++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) store(found[row][block], lines + row * columns + block * LANES);
    }

    // WIDE * LANES columns of `rows` rows as whole numbers.
    template <int WIDE>
    void round_columns(const float *from, int64_t rows, int which) {
        for (int block = 0; block < WIDE; block++) {
            const float *at = from + block * LANES;
            int16_t *to = panel[which] + block * 2 * LANES;
            Lanes most = {}, all = {};
            for (int64_t row = 0; row < rows; row++) {
                Lanes x = magnitude(load(at + row * columns));
                most = x > most ? x : most, all += x;
            }
            Scales found = scales_of_weights(most, all);
            panel_scales[which][block] = found.scale;
            for (int64_t row = 0; row < rows; row += 2, to += 2 * WIDE * LANES) {
                const float *pair = at + row * columns;
                _mm512_store_si512(to, pairs_of(load(pair) * found.factor, load(pair + columns) * found.factor));
            }
        }
    }

    template <int ROWS, int WIDE>
    APART void add(const int16_t *left, int64_t depth, int which, float *sums, int64_t width) {
        __m512i found[ROWS][WIDE];
        multiply_pairs<ROWS, WIDE>(left, 2, 2 * dim, panel[which], 2 * LANES, 2 * WIDE * LANES, depth, found);
        ALL_AT_ONCE
        for (int row = 0; row < ROWS; row++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) {
                float *place = sums + row * width + block * LANES;
                store(load(place) + (Lanes)_mm512_cvtepi32_ps(found[row][block]) * panel_scales[which][block], place);
            }
    }
};
#endif

}  // namespace

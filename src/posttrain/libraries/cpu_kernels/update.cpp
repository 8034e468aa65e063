// The elementwise work of an update between its matrix products, forward and backward: RMS norms, gated activations, position
// embeddings, scores of drawn tokens over a tile of the vocabulary, gradients into masters, AdamW.
//
// Each is one pass over memory in the place of three to ten torch operations. All is computed in float32 and rounded once, where it
// is stored. Sums over rows go block by block, so that no bit depends on the number of threads. update.py says what the arguments are.

#include "lanes.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t MANY_NUMBERS = 1 << 15;  // from here on work is worth waking another thread for
constexpr int64_t BLOCK = 64;              // rows whose part of a weight's gradient is added up at a time
constexpr int64_t PIECE = 1 << 14;         // numbers of a flat tensor that a thread takes at a time

// Calls work(i, count) for every LANES numbers of a width, and for the fewer that are left at its end.
template <class Work>
inline __attribute__((always_inline)) void parts(int64_t width, Work work) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) work(i, LANES);
    if (i < width) work(i, int(width - i));
}

template <class T>
inline __attribute__((always_inline)) Lanes get(const T *from, int count) {
    return count == LANES ? load(from) : load_part(from, count);
}

template <class T>
inline __attribute__((always_inline)) void put(Lanes lanes, T *to, int count) {
    if (count == LANES) return store(lanes, to);
    T part[LANES];
    store(lanes, part);
    std::memcpy(to, part, count * sizeof(T));
}

// x / sqrt(mean(x^2) + eps) in one of these forms, as the model has it.
enum NormForm { ROUNDED, ONE_MORE, UNROUNDED };  // times the weight after rounding; times 1 + the weight; times the weight

template <class T>
void norm_forward(
    const T *x, const T *weight, float eps, int form, int64_t rows, int64_t width, T *y, float *scales, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= MANY_NUMBERS)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = x + row * width;
        T *to = y + row * width;
        Lanes squares = {};
        parts(width, [&](int64_t i, int count) { squares += get(from + i, count) * get(from + i, count); });
        float scale = scales[row] = 1 / std::sqrt(sum(squares) / width + eps);
        parts(width, [&](int64_t i, int count) {
            Lanes scaled = get(from + i, count) * scale, gain = get(weight + i, count);
            if (form == ROUNDED) scaled = rounded<T>(scaled);
            put(scaled * (form == ONE_MORE ? 1.0f + gain : gain), to + i, count);
        });
    }
}

// With n = x scale, and gradients g of the output, w the gain: dx = (g w - n mean(g w n)) scale, dw = sum over rows of g n.
template <class T>
void norm_backward(
    const T *grad, const T *x, const T *weight, const float *scales, int form, int64_t rows, int64_t width, T *grad_x,
    float *grad_weight, int threads) {
    int64_t blocks_of_rows = (rows + BLOCK - 1) / BLOCK;
    std::vector<float> sums(grad_weight ? blocks_of_rows * width : 0);
#pragma omp parallel for num_threads(threads) if (rows * width >= MANY_NUMBERS)
    for (int64_t block = 0; block < blocks_of_rows; block++) {
        for (int64_t row = block * BLOCK; row < std::min(rows, (block + 1) * BLOCK); row++) {
            const T *from = x + row * width, *given = grad + row * width;
            float scale = scales[row];
            Lanes products = {};
            parts(width, [&](int64_t i, int count) {
                Lanes g = get(given + i, count), scaled = get(from + i, count) * scale, gain = get(weight + i, count);
                if (form == ONE_MORE) gain += 1.0f;
                products += g * gain * scaled;
                if (grad_weight) {
                    float *to = sums.data() + block * width + i;
                    put(get(to, count) + g * scaled, to, count);
                }
            });
            if (!grad_x) continue;
            float mean = sum(products) / width;
            parts(width, [&](int64_t i, int count) {
                Lanes g = get(given + i, count), scaled = get(from + i, count) * scale, gain = get(weight + i, count);
                if (form == ONE_MORE) gain += 1.0f;
                put((g * gain - scaled * mean) * scale, grad_x + row * width + i, count);
            });
        }
    }
    if (!grad_weight) return;
    std::memset(grad_weight, 0, width * sizeof(float));
    for (int64_t block = 0; block < blocks_of_rows; block++)
        parts(width, [&](int64_t i, int count) {
            put(get(grad_weight + i, count) + get(sums.data() + block * width + i, count), grad_weight + i, count);
        });
}

// 1 / (1 + e^-2z) of the activation x sigmoid: silu has 2z = x, gelu's approximation by tanh 2z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float GELU = 1.5957691216f, CUBE = 0.044715f;

inline Lanes sigmoid(Lanes x, bool gelu) {
    Lanes power = gelu ? -GELU * x * (1.0f + CUBE * x * x) : -x;
    return 1.0f / (1.0f + exponential(power));
}

template <class T>
void gated_forward(
    const T *gate, const T *up, int64_t gate_stride, int64_t up_stride, bool gelu, int64_t rows, int64_t width, T *y, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= MANY_NUMBERS)
    for (int64_t row = 0; row < rows; row++)
        parts(width, [&](int64_t i, int count) {
            Lanes x = get(gate + row * gate_stride + i, count), other = get(up + row * up_stride + i, count);
            put(rounded<T>(x * sigmoid(x, gelu)) * other, y + row * width + i, count);
        });
}

// With s the sigmoid of 2z: d up = g x s; d gate = g up (s + x s (1 - s) d2z/dx).
template <class T>
void gated_backward(
    const T *grad, const T *gate, const T *up, int64_t gate_stride, int64_t up_stride, bool gelu, int64_t rows, int64_t width,
    T *grad_gate, T *grad_up, int64_t grad_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= MANY_NUMBERS)
    for (int64_t row = 0; row < rows; row++)
        parts(width, [&](int64_t i, int count) {
            Lanes g = get(grad + row * width + i, count);
            Lanes x = get(gate + row * gate_stride + i, count), other = get(up + row * up_stride + i, count);
            Lanes s = sigmoid(x, gelu), inner = x * s * (1.0f - s);
            if (gelu) inner *= GELU * (1.0f + 3.0f * CUBE * x * x);
            put(g * other * (s + inner), grad_gate + row * grad_stride + i, count);
            put(g * (x * s), grad_up + row * grad_stride + i, count);
        });
}

// Position embeddings by halves: y = x cos + (-second, first) sin, of every head of a row; backward is the transposed matrix.
template <class T>
void rotate(
    const T *x, int64_t row_stride, int64_t head_stride, const T *cos, const T *sin, bool backward, int64_t rows, int64_t heads,
    int64_t dim, T *y, int threads) {
    int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) if (rows * heads * dim >= MANY_NUMBERS)
    for (int64_t row = 0; row < rows; row++) {
        const T *low_cos = cos + row * dim, *low_sin = sin + row * dim;
        for (int64_t head = 0; head < heads; head++) {
            const T *from = x + row * row_stride + head * head_stride;
            T *to = y + (row * heads + head) * dim;
            parts(half, [&](int64_t i, int count) {
                Lanes first = get(from + i, count), second = get(from + half + i, count);
                Lanes sin_first = get(low_sin + i, count), sin_second = get(low_sin + half + i, count);
                if (backward) std::swap(sin_first, sin_second), sin_first = -sin_first, sin_second = -sin_second;
                put(first * get(low_cos + i, count) - second * sin_first, to + i, count);
                put(second * get(low_cos + half + i, count) + first * sin_second, to + half + i, count);
            });
        }
    }
}

// What softmax needs of a tile of logits x = factor * tile: its largest, and with e = exp(x - largest), d = x - largest, the sums of
// e, e d and e^2 (where asked for); and the targets' x, where the tile holds them.
template <class T>
void tile_forward(
    const T *tile, int64_t rows, int64_t width, float factor, const int64_t *targets, int64_t begin, float *chosen, float *top,
    float *total, float *product, float *square, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= MANY_NUMBERS)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = tile + row * width;
        Lanes largest = -INFINITY - Lanes{};
        parts(width, [&](int64_t i, int count) {
            Lanes x = get(from + i, count) * factor;
            for (int lane = count; lane < LANES; lane++) x[lane] = -INFINITY;
            largest = x > largest ? x : largest;
        });
        float most = largest[0];
        for (int lane = 1; lane < LANES; lane++) most = std::max(most, largest[lane]);
        Lanes sums = {}, products = {}, squares = {};
        parts(width, [&](int64_t i, int count) {
            Lanes distance = get(from + i, count) * factor - most, e = exponential(distance);
            for (int lane = count; lane < LANES; lane++) e[lane] = distance[lane] = 0;
            sums += e, products += e * distance, squares += e * e;
        });
        top[row] = most, total[row] = sum(sums), product[row] = sum(products);
        if (square) square[row] = sum(squares);
        int64_t place = targets[row] - begin;
        if (place >= 0 && place < width) chosen[row] = load_part(from + place, 1)[0] * factor;
    }
}

// The gradient of a tile of logits, written over it: with log p = factor * tile - shift, -p (a + b (log p + entropy)) * by, and at the
// target what is given. Without b and entropies, -p a * by.
template <class T>
void tile_backward(
    T *tile, int64_t rows, int64_t width, float factor, const float *shift, const float *a, const float *b, const float *entropies,
    const float *at_target, float by, const int64_t *targets, int64_t begin, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= MANY_NUMBERS)
    for (int64_t row = 0; row < rows; row++) {
        T *to = tile + row * width;
        float less = shift ? shift[row] : 0, outer = -by * a[row], inner = b ? -by * b[row] : 0, entropy = b ? entropies[row] : 0;
        parts(width, [&](int64_t i, int count) {
            Lanes log_p = get(to + i, count) * factor - less, weight = outer - Lanes{};
            if (b) weight += inner * (log_p + entropy);
            put(exponential(log_p) * weight, to + i, count);
        });
        int64_t place = targets[row] - begin;
        if (place >= 0 && place < width) put(at_target[row] - Lanes{}, to + place, 1);
    }
}

template <class Work>
void pieces(int64_t numbers, int threads, Work work) {
    int64_t count = (numbers + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(threads) if (numbers >= MANY_NUMBERS)
    for (int64_t piece = 0; piece < count; piece++) {
        int64_t begin = piece * PIECE;
        parts(std::min(PIECE, numbers - begin), [&](int64_t i, int width) { work(begin + i, width); });
    }
}

// into += from
template <class T>
void add(const T *from, float *into, int64_t numbers, int threads) {
    pieces(numbers, threads, [&](int64_t i, int count) { put(get(into + i, count) + get(from + i, count), into + i, count); });
}

Lanes root(Lanes x) {
#ifdef __AVX512F__
    return (Lanes)_mm512_sqrt_ps((__m512)x);
#endif
    for (int lane = 0; lane < LANES; lane++) x[lane] = std::sqrt(x[lane]);
    return x;
}

// AdamW (arXiv:1711.05101, algorithm 2), and the rounded copy of the weights where there is one. Gradients are multiplied by `clip`.
template <class T>
void adamw(
    float *weights, const float *grads, float *means, float *squares, T *copy, int64_t numbers, double rate, double beta1,
    double beta2, double eps, double decay, double steps, double clip, int threads) {
    float keep = 1 - rate * decay, size = rate / (1 - std::pow(beta1, steps)), root_of_bias = std::sqrt(1 - std::pow(beta2, steps));
    float first = beta1, second = beta2, one_less = 1 - beta1, two_less = 1 - beta2, small = eps, times = clip;
    pieces(numbers, threads, [&](int64_t i, int count) {
        Lanes g = get(grads + i, count) * times;
        Lanes mean = get(means + i, count) * first + g * one_less, square = get(squares + i, count) * second + g * g * two_less;
        Lanes weight = get(weights + i, count) * keep - size * mean / (root(square) / root_of_bias + small);
        put(mean, means + i, count), put(square, squares + i, count), put(weight, weights + i, count);
        if (copy) put(weight, copy + i, count);
    });
}

}  // namespace

#define FOR_DTYPE(NAME, T)                                                                                                       \
    extern "C" void norm_forward_##NAME(                                                                                         \
        const T *x, const T *weight, float eps, int form, int64_t rows, int64_t width, T *y, float *scales, int threads) {       \
        norm_forward(x, weight, eps, form, rows, width, y, scales, threads);                                                     \
    }                                                                                                                            \
    extern "C" void norm_backward_##NAME(                                                                                        \
        const T *grad, const T *x, const T *weight, const float *scales, int form, int64_t rows, int64_t width, T *grad_x,       \
        float *grad_weight, int threads) {                                                                                       \
        norm_backward(grad, x, weight, scales, form, rows, width, grad_x, grad_weight, threads);                                 \
    }                                                                                                                            \
    extern "C" void gated_forward_##NAME(                                                                                        \
        const T *gate, const T *up, int64_t gate_stride, int64_t up_stride, bool gelu, int64_t rows, int64_t width, T *y,        \
        int threads) {                                                                                                           \
        gated_forward(gate, up, gate_stride, up_stride, gelu, rows, width, y, threads);                                          \
    }                                                                                                                            \
    extern "C" void gated_backward_##NAME(                                                                                       \
        const T *grad, const T *gate, const T *up, int64_t gate_stride, int64_t up_stride, bool gelu, int64_t rows,              \
        int64_t width, T *grad_gate, T *grad_up, int64_t grad_stride, int threads) {                                             \
        gated_backward(grad, gate, up, gate_stride, up_stride, gelu, rows, width, grad_gate, grad_up, grad_stride, threads);     \
    }                                                                                                                            \
    extern "C" void rotate_##NAME(                                                                                               \
        const T *x, int64_t row_stride, int64_t head_stride, const T *cos, const T *sin, bool backward, int64_t rows,            \
        int64_t heads, int64_t dim, T *y, int threads) {                                                                         \
        rotate(x, row_stride, head_stride, cos, sin, backward, rows, heads, dim, y, threads);                                    \
    }                                                                                                                            \
    extern "C" void tile_forward_##NAME(                                                                                         \
        const T *tile, int64_t rows, int64_t width, float factor, const int64_t *targets, int64_t begin, float *chosen,          \
        float *top, float *total, float *product, float *square, int threads) {                                                  \
        tile_forward(tile, rows, width, factor, targets, begin, chosen, top, total, product, square, threads);                   \
    }                                                                                                                            \
    extern "C" void tile_backward_##NAME(                                                                                        \
        T *tile, int64_t rows, int64_t width, float factor, const float *shift, const float *a, const float *b,                  \
        const float *entropies, const float *at_target, float by, const int64_t *targets, int64_t begin, int threads) {          \
        tile_backward(tile, rows, width, factor, shift, a, b, entropies, at_target, by, targets, begin, threads);                \
    }                                                                                                                            \
    extern "C" void add_##NAME(const T *from, float *into, int64_t numbers, int threads) { add(from, into, numbers, threads); }  \
    extern "C" void adamw_##NAME(                                                                                                \
        float *weights, const float *grads, float *means, float *squares, T *copy, int64_t numbers, double rate, double beta1,   \
        double beta2, double eps, double decay, double steps, double clip, int threads) {                                        \
        adamw(weights, grads, means, squares, copy, numbers, rate, beta1, beta2, eps, decay, steps, clip, threads);              \
    }

FOR_DTYPE(bfloat16, bfloat16)
FOR_DTYPE(float32, float)

/* C = alpha * op(A) op(B) + beta * C in single precision, as BLAS defines cblas_sgemm; vectorized, but not blocked. */

#include <stddef.h>
#include <string.h>

enum { ROW_MAJOR = 101, COLUMN_MAJOR = 102, NO_TRANSPOSE = 111 };

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    if (order == COLUMN_MAJOR) {
        cblas_sgemm(ROW_MAJOR, transpose_b, transpose_a, n, m, k, alpha, b, ldb, a, lda, beta, c, ldc);
        return;
    }
    const size_t down = transpose_a == NO_TRANSPOSE ? lda : 1, right = transpose_a == NO_TRANSPOSE ? 1 : lda;
    for (size_t i = 0; i < (size_t)m; i++) {
        const float *x = a + i * down;
        float *y = c + i * ldc;
        if (beta == 0)
            memset(y, 0, n * sizeof(float)); /* whatever it held, NaN too */
        else
            for (int j = 0; j < n; j++) y[j] *= beta;
        for (int p = 0; transpose_b == NO_TRANSPOSE && p < k; p++) {
            const float factor = alpha * x[p * right], *row = b + p * (size_t)ldb;
            for (int j = 0; j < n; j++) y[j] += factor * row[j];
        }
        for (int j = 0; transpose_b != NO_TRANSPOSE && j < n; j++) {
            const float *row = b + j * (size_t)ldb;
            float sum = 0;
            if (right == 1) {
#pragma omp simd reduction(+ : sum)
                for (int p = 0; p < k; p++) sum += x[p] * row[p];
            } else {
                for (int p = 0; p < k; p++) sum += x[p * right] * row[p];
            }
            y[j] += alpha * sum;
        }
    }
}

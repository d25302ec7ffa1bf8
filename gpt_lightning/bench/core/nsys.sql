-- Kernels by NVTX range: name, occurrences, kernels, sum of their milliseconds.
-- A kernel belongs to the ranges around its launch, in any thread: autograd launches the backward's
-- from a thread of its own.
SELECT coalesce(range.text, name.value), count(DISTINCT range.rowid), count(*),
  sum(kernel.end - kernel.start) / 1e6
FROM CUPTI_ACTIVITY_KIND_KERNEL AS kernel
JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS launch USING (correlationId)
JOIN NVTX_EVENTS AS range ON launch.start BETWEEN range.start AND range.end
LEFT JOIN StringIds AS name ON name.id = range.textId
GROUP BY 1 ORDER BY 4 DESC

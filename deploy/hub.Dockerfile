# The hub: no torch, no compiler. Build it in the root of the source:
#   docker build -f deploy/hub.Dockerfile -t atoll-hub .
ARG PYTHON=python:3.12-slim
FROM ${PYTHON} AS build
# What may be left out: nats (--queue nats://...), lan (found by `atoll join` without a ticket),
# otel (--otlp), several of them with commas.
ARG EXTRAS=""
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY atoll atoll
RUN python -m venv /opt/atoll \
    && /opt/atoll/bin/python -m pip install --no-cache-dir ".${EXTRAS:+[$EXTRAS]}" \
    && /opt/atoll/bin/python -m pip uninstall --yes pip setuptools

FROM ${PYTHON}
RUN useradd --uid 10001 --home-dir /data --no-create-home atoll \
    && install -d -o atoll -g atoll /data /ticket
ENV PATH=/opt/atoll/bin:$PATH ATOLL_HOME=/data PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /data
VOLUME ["/data"]
EXPOSE 7700
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s CMD ["python", "-c", "import ssl, urllib.request as web; web.urlopen('https://127.0.0.1:7700/healthz', timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["atoll"]
CMD ["hub", "--data", "/data/hub", "--runs", "/data/runs"]
# Last, so that the layers above stay the same when the code changes.
COPY --from=build /opt/atoll /opt/atoll

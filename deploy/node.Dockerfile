# A node: the agent and everything its processes need to train. Build it in the root of the source:
#   docker build -f deploy/node.Dockerfile -t atoll-node .
# torch as pip finds it brings the libraries for NVIDIA GPUs, some gigabytes. For processors only,
# let pip look where builds without them are:
#   docker build -f deploy/node.Dockerfile --build-arg TORCH_OPTIONS="--index-url ADDRESS" -t atoll-node .
ARG PYTHON=python:3.12-slim
FROM ${PYTHON} AS build
ARG TORCH_OPTIONS=""
ARG EXTRAS=train,store
WORKDIR /source
RUN python -m venv /opt/atoll \
    && /opt/atoll/bin/python -m pip install --no-cache-dir ${TORCH_OPTIONS} "torch>=2.6"
COPY pyproject.toml README.md LICENSE ./
COPY atoll atoll
RUN /opt/atoll/bin/python -m pip install --no-cache-dir ".[$EXTRAS]"

FROM ${PYTHON}
RUN useradd --uid 10001 --home-dir /data --no-create-home atoll \
    && install -d -o atoll -g atoll /data /ticket
ENV PATH=/opt/atoll/bin:$PATH ATOLL_HOME=/data PYTHONUNBUFFERED=1
# By this label a node knows how to start its own worker in a container of this image.
LABEL atoll.python=/opt/atoll/bin/python
USER 10001:10001
WORKDIR /data
VOLUME ["/data"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["atoll"]
CMD ["join", "@/ticket/ticket"]
# Last, so that the layers above stay the same when the code changes.
COPY --from=build /opt/atoll /opt/atoll

# The gateway as a container: no compiler, no pip and no root in what runs.
#
#   docker build -t kvgate .
#   docker run -p 8080:8080 -e KVGATE_BACKENDS=http://gpu1:8000 -e KVGATE_API_KEYS=secret kvgate
#
# It listens on 0.0.0.0, so it wants KVGATE_API_KEYS (or, in a network where everyone may use it, --allow-public:
# `docker run … kvgate serve --host 0.0.0.0 --allow-public`). Settings: KVGATE_… variables, or a file mounted at
# /etc/kvgate/kvgate.yaml. Tokenizers fetched from a model hub are kept in /var/lib/kvgate.

FROM python:3.12-slim AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

WORKDIR /src
RUN python -m venv /opt/kvgate
# Before the sources, so that a change of code installs no dependency anew.
COPY requirements/serve.txt requirements/serve.txt
RUN /opt/kvgate/bin/pip install --no-cache-dir --requirement requirements/serve.txt
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
RUN /opt/kvgate/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist . \
    && /opt/kvgate/bin/pip install --no-cache-dir --no-deps /dist/*.whl \
    && /opt/kvgate/bin/python -m compileall -q /opt/kvgate/lib/python3.12/site-packages/gateway \
    && /opt/kvgate/bin/pip uninstall --yes pip


FROM python:3.12-slim

RUN groupadd --gid 10001 kvgate \
    && useradd --uid 10001 --gid kvgate --no-create-home --home-dir /var/lib/kvgate --shell /usr/sbin/nologin kvgate \
    && install --directory --owner kvgate --group kvgate /var/lib/kvgate \
    && install --directory /etc/kvgate
COPY --from=build /opt/kvgate /opt/kvgate

ENV PATH=/opt/kvgate/bin:$PATH \
    HF_HOME=/var/lib/kvgate/huggingface \
    HF_HUB_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# kvgate.yaml of the current folder is read.
WORKDIR /etc/kvgate
USER 10001:10001
VOLUME ["/var/lib/kvgate"]
EXPOSE 8080

# Whether the gateway lives. Whether a backend answers is /ready: a gateway is not to be restarted for its backends.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('KVGATE_PORT', '8080') + '/health', timeout=2)"]

ENTRYPOINT ["kvgate"]
CMD ["serve", "--host", "0.0.0.0"]

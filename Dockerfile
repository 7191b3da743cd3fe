# syntax=docker/dockerfile:1
# A release names it by its digest, so that both architectures are built on the same one: .github/workflows/release.yml.
ARG PYTHON_IMAGE=python:3.12.15-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE .ci/image-requirements.txt ./
COPY services ./services
COPY migrations ./migrations
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --disable-pip-version-check --wheel-dir /wheels --require-hashes -r image-requirements.txt \
    && pip wheel --disable-pip-version-check --wheel-dir /wheels --no-deps .

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="penstock" \
      org.opencontainers.image.description="A durable task pipeline: one image, six processes" \
      org.opencontainers.image.licenses="MIT"
# The wheels are mounted, not copied: they would stay in a layer and double the image.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --disable-pip-version-check --no-cache-dir --no-index --find-links=/wheels "penstock[server,encryption,kafka,rabbitmq,otel]" \
    && useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin penstock
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# Handlers are looked for here: mount or copy yours, then `worker --app yourmodule`.
WORKDIR /app
# Where it is mounted in a read-only container, ECS gives the mount the owner and mode of a volume that the image declares.
VOLUME ["/tmp"]
# By number, so that an orchestrator can tell that it is not root.
USER 10001:10001
EXPOSE 8080 9464
ENTRYPOINT ["penstock"]

# The command line, beat, Flower and the Chroma server: everything without torch.
FROM python:3.11.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 RAGSPEC_HOME=/var/lib/ragspec

# Volumes take over these folders' owner when they are made.
RUN useradd --system --uid 10001 --create-home ragspec \
 && install --directory --owner=ragspec --group=ragspec /var/lib/ragspec /var/lib/chroma /data

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY ragspec ragspec
COPY producer producer
COPY worker worker
COPY migrations migrations
RUN pip install --constraint constraints.txt . flower \
 && python -c "import importlib.util as u; assert u.find_spec('torch') is None, 'torch has crept in'"

USER ragspec
WORKDIR /data
ENTRYPOINT ["ragspec"]
CMD ["--help"]

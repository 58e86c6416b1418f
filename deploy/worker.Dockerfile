# A worker on an NVIDIA GPU. torch's wheel brings the CUDA libraries; the host brings the driver and its container toolkit.
FROM python:3.11.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 RAGSPEC_HOME=/var/lib/ragspec \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# For RAGSPEC_DEVICE=cpu: the int8 kernels are compiled for the processor that they meet, at first start.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

# A volume takes over this folder's owner when it is made.
RUN useradd --system --uid 10001 --create-home ragspec \
 && install --directory --owner=ragspec --group=ragspec /var/lib/ragspec /data

WORKDIR /src
# By themselves, so that a change of our code does not fetch gigabytes again.
COPY constraints.txt ./
RUN grep -E '^(torch|transformers|sentence-transformers|safetensors|numpy)==' constraints.txt > large.txt \
 && pip install --constraint constraints.txt --requirement large.txt
COPY pyproject.toml README.md LICENSE ./
COPY ragspec ragspec
COPY producer producer
COPY worker worker
COPY migrations migrations
RUN pip install --constraint constraints.txt '.[worker,documents]'

USER ragspec
WORKDIR /data
ENTRYPOINT ["ragspec"]
CMD ["worker"]

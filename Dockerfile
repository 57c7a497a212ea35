# pgra on a CPU: docker build -t pgra . && docker run --rm -v "$PWD:/work" pgra --help
FROM python:3.11-slim
# The address of an index with torch's CPU wheels makes the image smaller by CUDA: --build-arg TORCH_INDEX=...
ARG TORCH_INDEX=
RUN pip install --no-cache-dir torch==2.13.0 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
COPY . /src
RUN pip install --no-cache-dir "/src[lm,reports,demo,openai,serve]" \
 && pip install --no-cache-dir --no-deps --require-hashes -r /src/requirements-bundled.txt
WORKDIR /work
ENTRYPOINT ["pgra"]

# pgra on a CPU: docker build -t pgra . && docker run --rm -v "$PWD:/work" pgra --help
FROM python:3.11-slim
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install --no-cache-dir "/src[cpu,openai,web]" \
 && pip install --no-cache-dir --no-deps --require-hashes -r /src/requirements-bundled.txt
WORKDIR /work
ENTRYPOINT ["pgra"]

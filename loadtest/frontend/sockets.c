/* The cheapest ends of a stream: what the kernel charges for a write, and a client that costs little.

   sockets send STREAMS BYTES CHUNKS GAP_US
       Listen, print the port, take STREAMS connections, send CHUNKS chunks to each in turn, resting GAP_US
       between two turns, and print: chunks, user seconds, kernel seconds, wall seconds.
   sockets read PORT STREAMS ROUNDS MARK
       Connect STREAMS times. In each round send every connection the request on stdin, in which the eight
       signs @@@@@@@@ stand for a number of its own, and read until each answer holds MARK. Print, by round:
       events ("\n\n"), bytes, and of the times between two reads of a stream the median, the 99th percentile
       and the longest, in microseconds, from when every stream has had an event until the first has ended:
       headers come long before the first event where streams wait for a place. With an empty MARK nothing is
       sent, and every connection is read to its end. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static double seconds(struct timeval t) { return t.tv_sec + 1e-6 * t.tv_usec; }

static int do_send(int num_streams, int num_bytes, int num_chunks, int gap_us) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t address_len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (void *)&address, address_len) || listen(listener, num_streams))
        fail("listen");
    getsockname(listener, (void *)&address, &address_len);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    int *streams = calloc(num_streams, sizeof *streams);
    int one = 1, buffer = 256 * 1024;
    for (int i = 0; i < num_streams; i++) {
        if ((streams[i] = accept(listener, NULL, NULL)) < 0) fail("accept");
        setsockopt(streams[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(streams[i], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    }
    char *chunk = malloc(num_bytes);
    memset(chunk, 'x', num_bytes);
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    int64_t began = now_ns();
    for (int turn = 0; turn < num_chunks; turn++) {
        for (int i = 0; i < num_streams; i++)
            for (int sent = 0; sent < num_bytes;) {
                ssize_t n = send(streams[i], chunk + sent, num_bytes - sent, MSG_NOSIGNAL);
                if (n < 0) fail("send");
                sent += n;
            }
        if (gap_us) usleep(gap_us);
    }
    double wall_s = 1e-9 * (now_ns() - began);
    getrusage(RUSAGE_SELF, &after);
    printf("%lld %.6f %.6f %.6f\n", (long long)num_chunks * num_streams,
           seconds(after.ru_utime) - seconds(before.ru_utime),
           seconds(after.ru_stime) - seconds(before.ru_stime), wall_s);
    return 0;
}

typedef struct {
    int number;
    int matched; /* signs of MARK seen so far */
    int has_begun;
    char last;
    int64_t read_ns;
} Stream;

#define MAX_GAPS (1 << 22)
static uint32_t gaps[MAX_GAPS];
static int num_gaps;

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static int do_read(int port, int num_streams, int num_rounds, const char *mark) {
    static char request[1 << 16], data[1 << 18];
    int mark_len = strlen(mark), request_len = 0;
    while (mark_len) {
        ssize_t n = read(0, request + request_len, sizeof request - 1 - request_len);
        if (n <= 0) break;
        request_len += n;
    }
    char *place = strstr(request, "@@@@@@@@");
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons(port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    Stream *streams = calloc(num_streams, sizeof *streams);
    int poll = epoll_create1(0);
    for (int i = 0; i < num_streams; i++) {
        streams[i].number = socket(AF_INET, SOCK_STREAM, 0);
        if (streams[i].number < 0 || connect(streams[i].number, (void *)&address, sizeof address))
            fail("connect");
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &streams[i]};
        epoll_ctl(poll, EPOLL_CTL_ADD, streams[i].number, &event);
    }
    for (int turn = 0, serial = 0; turn < num_rounds; turn++) {
        long long num_events = 0, num_bytes = 0;
        int num_open = num_streams, num_begun = 0;
        int64_t all_begun_ns = INT64_MAX;
        num_gaps = 0;
        for (int i = 0; i < num_streams; i++) {
            streams[i].matched = streams[i].has_begun = 0;
            streams[i].read_ns = 0;
            if (!mark_len) continue;
            if (place) {
                char number[9];
                snprintf(number, sizeof number, "%08d", serial++ % 100000000);
                memcpy(place, number, 8);
            }
            if (send(streams[i].number, request, request_len, MSG_NOSIGNAL) != request_len) fail("request");
        }
        while (num_open) {
            struct epoll_event events[256];
            int n = epoll_wait(poll, events, 256, -1);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) fail("epoll_wait");
            for (int k = 0; k < n; k++) {
                Stream *stream = events[k].data.ptr;
                ssize_t len = read(stream->number, data, sizeof data);
                if (len < 0) fail("read");
                if (len == 0) {
                    if (mark_len) {
                        fprintf(stderr, "the server closed a stream\n");
                        return 1;
                    }
                    epoll_ctl(poll, EPOLL_CTL_DEL, stream->number, NULL);
                    num_open--;
                    continue;
                }
                int64_t at_ns = now_ns();
                if (stream->read_ns >= all_begun_ns && num_open == num_streams && num_gaps < MAX_GAPS)
                    gaps[num_gaps++] = (at_ns - stream->read_ns) / 1000;
                stream->read_ns = at_ns;
                num_bytes += len;
                if (!mark_len) continue;
                char last = stream->last;
                int matched = stream->matched;
                long long num_before = num_events;
                for (ssize_t i = 0; i < len; i++) {
                    char c = data[i];
                    num_events += c == '\n' && last == '\n';
                    last = c;
                    matched = c == mark[matched] ? matched + 1 : c == mark[0];
                    if (matched == mark_len) {
                        num_open--;
                        matched = 0;
                    }
                }
                if (!stream->has_begun && num_events > num_before) {
                    stream->has_begun = 1;
                    if (++num_begun == num_streams) all_begun_ns = at_ns;
                }
                stream->last = last;
                stream->matched = matched;
            }
        }
        qsort(gaps, num_gaps, sizeof *gaps, by_value);
        printf("%lld %lld %u %u %u\n", num_events, num_bytes, num_gaps ? gaps[num_gaps / 2] : 0,
               num_gaps ? gaps[(long long)num_gaps * 99 / 100] : 0, num_gaps ? gaps[num_gaps - 1] : 0);
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 6 && !strcmp(argv[1], "send"))
        return do_send(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
    if (argc == 6 && !strcmp(argv[1], "read"))
        return do_read(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), argv[5]);
    fprintf(stderr, "see the head of sockets.c\n");
    return 2;
}

/* Preloaded into the programs of a node: its clock is TESTBED_CLOCK_AHEAD seconds ahead. Time that is only
 * counted (CLOCK_MONOTONIC, sleeping, waiting) stays as it is, on which libfaketime fails (EINVAL from sleep). */

#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    const char *ahead = getenv("TESTBED_CLOCK_AHEAD");
    if (!failed && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        double seconds = atof(ahead), whole = __builtin_floor(seconds);
        now->tv_sec += (time_t)whole;
        now->tv_nsec += (long)((seconds - whole) * 1e9);
        if (now->tv_nsec >= 1000000000) {
            now->tv_nsec -= 1000000000;
            now->tv_sec++;
        }
    }
    return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact))
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place)
{
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME_COARSE, &exact))
        return -1;
    if (place)
        *place = exact.tv_sec;
    return exact.tv_sec;
}

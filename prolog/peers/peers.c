/*
 * Authenticates the TCP connections between the ranks of one stage. It is preloaded into each rank,
 * and takes the place of libc's connect, listen, accept and accept4.
 *
 * MPI libraries believe whoever connects to their ports. Here the connecting rank first sends a
 * tag, which the accepting one checks before the MPI library knows of the connection: a digest of
 * the addresses and ports of both ends, keyed with a secret of the stage. So a tag is of no use on
 * any other connection, and one that was relayed does not match. Without a key in the environment
 * all four functions do what libc's do.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "siphash.h"

#define KEY_VARIABLE "STAGE_PEER_KEY"
#define EXPORTED __attribute__((visibility("default")))

#define MILLISECOND INT64_C(1000000)
#define SECOND (1000 * MILLISECOND)
/* The longest wait for a connection to another rank. */
#define CONNECT_PATIENCE (10 * SECOND)
/* How long the kernel keeps connections from the rank on which nothing has come. */
#define DEFER_SECONDS 10
/*
 * The longest wait for a tag, and the share of all time, one part in so many, that such waits may
 * take: strangers who send nothing must not hold the rank up.
 */
#define TAG_PATIENCE (10 * MILLISECOND)
#define WAIT_SHARE 20
/* Strangers after whom a listener that must not block says that nobody is there. */
#define MOST_STRANGERS 64

/* One end of a connection; an IPv4 address is mapped to IPv6. */
struct end {
	uint8_t address[16];
	uint8_t port[2];
};

union any_address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
	struct sockaddr_storage storage;
};

static struct {
	bool known;
	uint8_t bytes[STAGE_KEY_SIZE];
} key;

/* How the file is called of the library by which a rank reads stores of objects. */
#define STORE_LIBRARY "_obstore."
/* Whether what this thread now connects to is no rank. */
static _Thread_local bool is_untagged;

EXPORTED int accept4(int, struct sockaddr *restrict, socklen_t *restrict, int);
EXPORTED void stage_peers_untag(int);

static int hex_digit(char character)
{
	static const char digits[] = "0123456789abcdef";
	const char *found = character ? strchr(digits, character) : NULL;

	return found ? (int)(found - digits) : -1;
}

__attribute__((constructor)) static void read_key(void)
{
	const char *text = getenv(KEY_VARIABLE);

	if (!text || strlen(text) != sizeof(key.bytes) * 2)
		return;
	for (size_t i = 0; i < sizeof(key.bytes); i++) {
		const int high = hex_digit(text[2 * i]);
		const int low = hex_digit(text[2 * i + 1]);

		if (high < 0 || low < 0)
			return;
		key.bytes[i] = (uint8_t)(high << 4 | low);
	}
	key.known = true;
}

/*
 * The system calls that the functions below stand for. libc's own functions would have to be looked
 * up, and a look-up allocates.
 */
static int system_connect(int fd, const struct sockaddr *address, socklen_t length)
{
	return (int)syscall(SYS_connect, fd, address, length);
}

static int system_accept(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
	return (int)syscall(SYS_accept4, fd, address, length, flags);
}

static int64_t now(void)
{
	struct timespec time = { 0 };

	(void)clock_gettime(CLOCK_MONOTONIC, &time);
	return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
}

static bool is_tcp(int fd)
{
	int protocol = 0;
	socklen_t length = sizeof(protocol);

	return getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &length) == 0 &&
	       protocol == IPPROTO_TCP;
}

static bool read_end(const union any_address *from, struct end *end)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	switch (from->any.sa_family) {
	case AF_INET:
		memcpy(end->address, mapped, sizeof(mapped));
		memcpy(end->address + sizeof(mapped), &from->v4.sin_addr, 4);
		memcpy(end->port, &from->v4.sin_port, sizeof(end->port));
		return true;
	case AF_INET6:
		memcpy(end->address, &from->v6.sin6_addr, sizeof(end->address));
		memcpy(end->port, &from->v6.sin6_port, sizeof(end->port));
		return true;
	default:
		return false;
	}
}

/* Whether the address means this machine wherever it is used: loopback, or unspecified. */
static bool is_loopback(const struct end *end)
{
	struct in6_addr address;

	memcpy(&address, end->address, sizeof(address));
	if (IN6_IS_ADDR_V4MAPPED(&address))
		return end->address[12] == 127 || end->address[12] == 0;
	return IN6_IS_ADDR_LOOPBACK(&address) || IN6_IS_ADDR_UNSPECIFIED(&address);
}

/*
 * Has the connections that this thread makes from now on left alone, or no more: only the rank
 * itself knows that it asks a web server, which may have any address and port.
 */
EXPORTED void stage_peers_untag(int untag)
{
	is_untagged = untag != 0;
}

/*
 * Whether code of the stores' library is there. It connects by threads of its own, and goes
 * wherever a server redirects it to. MPI libraries are built in too many ways to know them so.
 */
static bool is_of_stores(const void *code)
{
	Dl_info found;

	if (dladdr(code, &found) == 0 || !found.dli_fname)
		return false;
	const char *slash = strrchr(found.dli_fname, '/');

	return slash && strncmp(slash + 1, STORE_LIBRARY, strlen(STORE_LIBRARY)) == 0;
}

/*
 * Whether a rank may listen there. Other services must not be sent a tag: PMIx's server, which is
 * on loopback, nor what a name service asks, such as LDAP or DNS, on a privileged port. Ranks,
 * which are no processes of root, listen on other ports.
 */
static bool may_be_rank(const struct sockaddr *address, socklen_t length)
{
	union any_address copy = { 0 };
	struct end end;

	if (length < sizeof(copy.v4))
		return false;
	memcpy(&copy, address, length < sizeof(copy) ? length : sizeof(copy));
	if (!read_end(&copy, &end) || is_loopback(&end))
		return false;
	const uint16_t port = (uint16_t)(end.port[0] << 8 | end.port[1]);

	return port >= IPPORT_RESERVED;
}

/*
 * Finds the ends of a connection: first the one that connected, then the one that accepted it.
 * Returns false if the connection has already ended.
 */
static bool find_ends(int fd, bool accepted, struct end ends[2])
{
	union any_address own = { 0 };
	union any_address other = { 0 };
	socklen_t own_length = sizeof(own);
	socklen_t other_length = sizeof(other);

	return getsockname(fd, &own.any, &own_length) == 0 &&
	       getpeername(fd, &other.any, &other_length) == 0 && read_end(&own, &ends[accepted]) &&
	       read_end(&other, &ends[!accepted]);
}

static void make_tag(const struct end ends[2], uint8_t tag[STAGE_TAG_SIZE])
{
	stage_siphash(key.bytes, (const uint8_t *)ends, 2 * sizeof(ends[0]), tag);
}

/* Waits until a connection that is under way is made, and returns as connect() would then. */
static int finish_connect(int fd, const struct sockaddr *address, socklen_t length)
{
	const int64_t deadline = now() + CONNECT_PATIENCE;
	struct pollfd waited = { .fd = fd, .events = POLLOUT };
	int ready = 0;

	while (ready == 0) {
		const int64_t left = deadline - now();

		if (left < MILLISECOND) {
			errno = ETIMEDOUT;
			return -1;
		}
		ready = poll(&waited, 1, (int)(left / MILLISECOND));
		if (ready < 0 && errno == EINTR)
			ready = 0;
	}
	return ready < 0 ? ready : system_connect(fd, address, length);
}

/*
 * Finds out whether this node has the address: then it is also the one from which the kernel would
 * send there. Nothing is sent. Returns -1 if the kernel does not say.
 */
static int is_own(const union any_address *other, bool *own)
{
	union any_address from = { 0 };
	socklen_t length = sizeof(from);
	struct end ends[2] = { 0 };
	const int fd = socket(other->any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	int result = system_connect(fd, &other->any, sizeof(*other));

	if (result == 0)
		result = getsockname(fd, &from.any, &length);
	(void)close(fd);
	if (result == 0 && read_end(&from, &ends[0]) && read_end(other, &ends[1]))
		*own = memcmp(ends[0].address, ends[1].address, sizeof(ends[0].address)) == 0;
	return result;
}

/*
 * Refuses to speak to this node itself: the other rank runs on another one. So its node has an
 * address that this node has too, as container bridges have everywhere, and here anybody may listen
 * on that address.
 */
static int refuse_own(int fd)
{
	union any_address other = { 0 };
	socklen_t length = sizeof(other);
	bool own = true;

	if (getpeername(fd, &other.any, &length) != 0)
		return 0; /* The caller learns of the end when it uses the connection. */
	if (is_own(&other, &own) != 0)
		return -1;
	if (own)
		errno = ECONNREFUSED;
	return own ? -1 : 0;
}

static int send_tag(int fd)
{
	struct end ends[2] = { 0 };
	uint8_t tag[STAGE_TAG_SIZE];

	if (refuse_own(fd) != 0)
		return -1;
	if (!find_ends(fd, false, ends))
		return 0; /* As above. */
	make_tag(ends, tag);
	/* Nothing was sent before, so there is room for all of it. */
	const ssize_t sent = send(fd, tag, sizeof(tag), MSG_NOSIGNAL | MSG_DONTWAIT);

	if (sent >= 0 && sent != sizeof(tag))
		errno = ECONNABORTED;
	return sent == sizeof(tag) ? 0 : -1;
}

EXPORTED int connect(int fd, const struct sockaddr *address, socklen_t length)
{
	const int errno_before = errno;
	const bool to_rank = key.known && !is_untagged && is_tcp(fd) &&
			     may_be_rank(address, length) &&
			     !is_of_stores(__builtin_return_address(0));
	int result = system_connect(fd, address, length);

	if (to_rank && result != 0 && (errno == EINPROGRESS || errno == EINTR || errno == EALREADY))
		result = finish_connect(fd, address, length);
	if (to_rank && result == 0)
		result = send_tag(fd);
	if (result == 0)
		errno = errno_before;
	return result;
}

/*
 * A connection without its tag comes to accept() only when the kernel was short of room for waiting
 * connections, or has waited for DEFER_SECONDS. In the first case the tag is under way. Each wait
 * is charged WAIT_SHARE times, and none begins with a charge of more than a second.
 */
static bool await_tag(int fd)
{
	static _Atomic int64_t charged_until;
	const int64_t begun = now();
	const int64_t until = atomic_load(&charged_until);
	const int64_t charge = until > begun ? until - begun : 0;
	const int64_t left = (SECOND - charge) / WAIT_SHARE;
	const int64_t patience = left < TAG_PATIENCE ? left : TAG_PATIENCE;
	struct pollfd waited = { .fd = fd, .events = POLLIN };

	if (patience < MILLISECOND)
		return false;
	const int ready = poll(&waited, 1, (int)(patience / MILLISECOND));

	atomic_store(&charged_until, begun + charge + (now() - begun) * WAIT_SHARE);
	return ready > 0;
}

/* Reads the tag. It is one segment: part of one comes from a stranger. */
static bool receive_tag(int fd, uint8_t tag[STAGE_TAG_SIZE])
{
	ssize_t got = recv(fd, tag, STAGE_TAG_SIZE, MSG_DONTWAIT);

	if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && await_tag(fd))
		got = recv(fd, tag, STAGE_TAG_SIZE, MSG_DONTWAIT);
	return got == STAGE_TAG_SIZE;
}

static bool is_from_rank(int fd)
{
	struct end ends[2] = { 0 };
	uint8_t expected[STAGE_TAG_SIZE];
	uint8_t received[STAGE_TAG_SIZE];
	uint8_t difference = 0;

	if (!find_ends(fd, true, ends) || !receive_tag(fd, received))
		return false;
	make_tag(ends, expected);
	/* All bytes are compared, so that the time does not tell how many were right. */
	for (size_t i = 0; i < STAGE_TAG_SIZE; i++)
		difference |= expected[i] ^ received[i];
	return difference == 0;
}

static bool blocks(int fd)
{
	const int flags = fcntl(fd, F_GETFL);

	return flags >= 0 && !(flags & O_NONBLOCK);
}

/* Accepts the next connection that a rank made, and closes those of strangers before it. */
static int accept_rank(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
	const int errno_before = errno;
	const socklen_t room = length ? *length : 0;

	for (int strangers = 0; strangers < MOST_STRANGERS || blocks(fd); strangers++) {
		if (length)
			*length = room;
		const int accepted = system_accept(fd, address, length, flags);

		if (accepted < 0)
			return accepted;
		if (is_from_rank(accepted)) {
			errno = errno_before;
			return accepted;
		}
		(void)close(accepted);
	}
	errno = EAGAIN;
	return -1;
}

EXPORTED int accept4(int fd, struct sockaddr *restrict address, socklen_t *restrict length,
		     int flags)
{
	if (key.known && is_tcp(fd))
		return accept_rank(fd, address, length, flags);
	return system_accept(fd, address, length, flags);
}

EXPORTED int accept(int fd, struct sockaddr *restrict address, socklen_t *restrict length)
{
	return accept4(fd, address, length, 0);
}

/* Has the kernel keep connections back until something came, so that silent ones cost nothing. */
EXPORTED int listen(int fd, int backlog)
{
	const int errno_before = errno;
	const int seconds = DEFER_SECONDS;

	/* What comes without it is refused all the same. */
	if (key.known && is_tcp(fd))
		(void)setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof(seconds));
	errno = errno_before;
	return (int)syscall(SYS_listen, fd, backlog);
}

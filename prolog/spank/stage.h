/*
 * The declarations that the files of slurm-stage's SPANK plugin share.
 *
 * The order in which the files act in the life of a job:
 *
 *   sbatch, salloc, srun     options.c  collects the values of --stage and --stage-tolerate
 *                            submit.c   checks them and passes the list to the job
 *   each node's prolog       prepare.c  starts the filesystem of the job's disks
 *   each node, as root       prepare.c  makes the user's folders; in the helper's step only
 *                            mark.c     marks the job as one that stages here
 *                            room.c     mounts the user's room beneath /run
 *   each node, as the user   gate.c     holds the tasks until every node has its files
 *   the job's end, as root   mark.c     cleans up after the job and removes its mark
 *
 * In each of them, order.c finds out whether pyxis is listed before this plugin.
 *
 * child.c runs the helper, `python -I -m stager`, which does the work. Its contract: text for the
 * user on stderr, for the plugin on stdout; exit code 0 to go on, any other fails the job with it.
 * For a job that stages nothing the plugin only reads a few variables and, in the batch step, the
 * comment lines at the head of the script.
 */
#ifndef STAGE_H
#define STAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <slurm/spank.h>

/* Exit codes for what the plugin itself refuses; stager has the same. */
enum { STAGE_USAGE = 2, STAGE_POLICY = 3, STAGE_LAUNCH = 8 };
/*
 * The code of a task whose wait was ended. It is the smallest, as srun ends with the largest of its
 * tasks, and the first one has the reason's.
 */
enum { STAGE_CANCELLED = 1 };

/*
 * Bytes of the longest list of directives from --stage options. It travels in environment strings,
 * and the kernel limits each to 128 KiB with its name.
 */
enum { STAGE_LIST_MAX = 120 * 1024 };
#define STAGE_TOO_LONG                                                                             \
	"stage: the --stage options are longer than %d bytes together; write #STAGE lines in "     \
	"the batch script instead, or stage a folder or an archive\n"

/* The list's name for spank_job_control_setenv, and with the prefix that Slurm adds. */
#define STAGE_LIST_NAME "STAGE"
#define STAGE_LIST_ENV "SLURM_SPANK_STAGE"
/* Set in the helper's step, in addition to the option --stage-helper. */
#define STAGE_HELPER_ENV "STAGE_HELPER"
/* Names slurmstepd's process for a rank, which ends with it. */
#define STAGE_PARENT_ENV "STAGE_PARENT"
/* Set in jobs and steps of commands with --quiet; named like the list. */
#define STAGE_QUIET_NAME "STAGE_QUIET"
#define STAGE_QUIET_ENV "SLURM_SPANK_STAGE_QUIET"
/* How many nodes may fail, from --stage-tolerate; named like the list. */
#define STAGE_TOLERATE_NAME "STAGE_TOLERATE"
#define STAGE_TOLERATE_ENV "SLURM_SPANK_STAGE_TOLERATE"
/* Set if the job asks for the filesystem of its nodes' disks; named like the list. Root's prolog on
 * each node sees the third. */
#define STAGE_SHARED_NAME "STAGE_SHARED"
#define STAGE_SHARED_ENV "SLURM_SPANK_STAGE_SHARED"
#define STAGE_SHARED_PROLOG_ENV "SPANK_STAGE_SHARED"
/* What a list has that asks for it, and perhaps one that does not. */
#define STAGE_SHARED_DST ":shared:/"
/* The nodes that have left the job since their stage failed; set if there are any. */
#define STAGE_FAILED_ENV "STAGE_FAILED_NODES"
/* Names the files that list which node holds which part of a folder with mode=shard. */
#define STAGE_SHARDS_ENV "STAGE_SHARDS"

/*
 * The folder on each node in which root and the ranks leave files for each other, in memory, so
 * that a reboot empties it. stager has the same paths, and the layout of a user's folder.
 */
#define STAGE_RUN "/run/slurm-stage"
/* Root's folder of the marks of jobs: JOB.UID. Only root may look into it. */
#define STAGE_RUN_JOBS STAGE_RUN "/jobs"
/* Root's lock: who marks a job or removes a mark has it, and who mounts a room or removes it. */
#define STAGE_RUN_LOCK STAGE_RUN "/lock"
/* Root's note of slurmd's mount namespace: its process id and the namespace's inode. */
#define STAGE_RUN_SLURMD STAGE_RUN "/slurmd"
/* Root's note that a user's folders are made, by uid. */
#define STAGE_RUN_PREPARED STAGE_RUN "/%u.prepared"
/* A user's room, by uid. */
#define STAGE_RUN_USER STAGE_RUN "/%u"
/*
 * What a user may put there, so that nobody fills /run: 4096 small files, as each takes a page of
 * 4 KiB, or the lists of what 16 jobs use at their longest.
 */
#define STAGE_ROOM_SIZE "size=16m,nr_inodes=4096"

/* The arguments after the plugin's path in plugstack.conf. */
struct stage_config {
	const char *python; /* the Python that has the package `stager` */
	const char *config; /* the site's stage.toml */
	const char *fault;  /* an argument that is not valid, or NULL */
};

#define STAGE_NOT_VALID                                                                            \
	"plugstack.conf: argument '%s' is not valid; write python=/PATH and config=/PATH"

/* config.c */
struct stage_config stage_config_parse(int argc, char **argv);
void stage_config_complain(const struct stage_config *config);
/* Each init counts its line, so that the number is final in any later function of the plugin. */
void stage_config_count_line(void);
bool stage_config_is_repeated(void);
#define STAGE_REPEATED                                                                             \
	"spank_stage.so is named more than once in plugstack.conf, so nothing can be staged; "     \
	"tell the administrator to keep one line"

/* The paths of the other plugin and of this one. */
#define STAGE_AFTER_PYXIS                                                                          \
	"in plugstack.conf, %s is above %s, so nothing can be staged; tell the administrator to "  \
	"move the line of spank_stage.so above that of pyxis"
/* The path of this plugin. */
#define STAGE_ELSEWHERE                                                                            \
	"a plugin that is above %s in plugstack.conf has entered a container, so nothing can be "  \
	"staged; tell the administrator to move the line of spank_stage.so above that of the "     \
	"other"

/* Ranks listen on ports, which nothing that runs as root does. */
#define STAGE_NOT_ROOT                                                                             \
	"root cannot stage: submit as an ordinary user; to stage for all users, submit as the "    \
	"owner in [shared] of stage.toml"

/* order.c */
/* The path of this plugin, and that of pyxis if it was loaded before, else NULL. */
const char *stage_order_own(void);
const char *stage_order_pyxis(void);
/* What is wrong if it was, with the files and lines if they can be found. */
const char *stage_order_fault(void);
/* Whether the task has entered a container since the first of these was called. */
void stage_order_note_surroundings(void);
bool stage_order_is_elsewhere(void);

/* options.c */
int stage_options_register(spank_t spank);
const char *stage_options_variable(void);
int stage_options_take_variable(void);
size_t stage_options_count(void);
const char *stage_options_value(size_t index);
const char *stage_options_tolerate(void);
bool stage_options_helper(void);

/* submit.c */
int stage_submit_forget_outer_job(void);
void stage_submit_pass_on_quiet(spank_t spank);
int stage_submit(spank_t spank, const struct stage_config *config);

/* prepare.c */
void stage_prepare_roots(const struct stage_config *config);
void stage_prepare(spank_t spank, const struct stage_config *config);
void stage_start_shared(spank_t spank, const struct stage_config *config);

/* gate.c */
void stage_gate_check_order(spank_t spank);
int stage_gate(spank_t spank, const struct stage_config *config);

/* mark.c */
void stage_expect_marks(void);
bool stage_make_folder(const char *path, mode_t mode);
bool stage_mark(spank_t spank);
void stage_clean_up(spank_t spank, const struct stage_config *config);

/* room.c */
void stage_room_note_namespace(void);
int stage_room_lock(void);
void stage_room_make(uid_t uid, gid_t gid, bool bounded);
/* How root looks at what a user may have mounted: the kernel answers with what it knows. */
#define STAGE_STATX (AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_STATX_DONT_SYNC)

/* The first arguments of every program: the Python module, its subcommand, the site's rules. */
#define STAGE_PROGRAM(config, ...)                                                                 \
	(config)->python, "-I", "-m", __VA_ARGS__, "--config", (config)->config

/*
 * child.c: runs a program and returns its exit code, STAGE_NOT_RUN, STAGE_SIGNALLED + N after
 * signal N, or STAGE_LATE after `limit` seconds; 0 is no limit. A program that is late is killed;
 * one that cannot be killed, since it waits for a disk, is left.
 */
enum { STAGE_NOT_RUN = 127, STAGE_SIGNALLED = 128, STAGE_LATE = 256 };
/*
 * Seconds for root's programs: a task waits for the first, and the node takes no jobs before the
 * second has ended. The second gives up by itself before (_TIME_LIMIT in stager/node/epilog.py),
 * and so does the third, for which the first task of a job waits (limits in
 * stager/node/shared_fs.py).
 */
enum { STAGE_PREPARE_LIMIT = 20, STAGE_CLEAN_UP_LIMIT = 45, STAGE_SHARED_LIMIT = 45 };
extern char *const stage_clean_environment[];
int stage_child_run(char *const argv[], char *const envp[], unsigned int limit);
/* Without a limit; `text` becomes what it writes to stdout, which the caller frees, or stays NULL.
 */
int stage_child_read(char *const argv[], char *const envp[], char **text);
int stage_child_wait(pid_t pid, unsigned int limit);
/* Logs that `what` (of a job or a user, the `id`) failed with that code, unless it is 0. */
void stage_child_complain(const char *what, const char *id, int code, unsigned int limit,
			  const struct stage_config *config);

#endif

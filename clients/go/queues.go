package penstock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	messageLimit = 1_000_000   // bytes of a message, and of all messages of a call; SQS accepts 1 MiB
	largestText  = 1<<20 - 256 // of a message with its attribute
	smallestSize = 1024        // bytes that any queue accepts in a message
	packBytes    = 200_000     // SQS bills each started 64 KiB, so larger messages save nothing
	callEntries  = 10
	linger       = 5 * time.Millisecond // for which an answer waits for others to share its call
	runTimesWait = 250 * time.Millisecond
	firstPause   = 200 * time.Millisecond
	longestPause = 10 * time.Second
	callWait     = 15 * time.Second
)

// pause is the backoff after so many failures in a row.
func pause(failures int) time.Duration {
	if failures > 6 {
		return longestPause
	}
	return firstPause << (failures - 1)
}

func sleep(ctx context.Context, duration time.Duration) {
	timer := time.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

type pending struct {
	text    string
	sent    chan error // gets nil, or a *refusal
	isAlone bool       // a message that it shared was refused
}

// refusal is the error of an entry that the results queue refuses, also alone.
type refusal struct {
	bytes  int
	reason string
}

func (r *refusal) Error() string {
	return fmt.Sprintf("it has %d bytes, and the results queue refuses it: %s", r.bytes, r.reason)
}

// sender sends entries to the results queue, several to a message, until the queue has accepted them.
type sender struct {
	queues *queueClient
	url    string
	worker string
	log    func(level, event string, fields map[string]any)

	mu         sync.Mutex
	pending    []pending
	wake       chan struct{}
	runTimes   map[string][2]float64
	runTimesAt time.Time
}

// send returns once the queue has the entry, or with a *refusal or the error of ctx.
func (s *sender) send(ctx context.Context, text string) error {
	if len(text) > largestText {
		return &refusal{len(text), "SQS accepts 1 MiB"}
	}
	one := pending{text: text, sent: make(chan error, 1)}
	s.mu.Lock()
	s.pending = append(s.pending, one)
	s.mu.Unlock()
	notify(s.wake)
	select {
	case err := <-one.sent:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ran counts an attempt that has ended; reported beside answers.
func (s *sender) ran(action string, took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	counted := s.runTimes[action]
	s.runTimes[action] = [2]float64{counted[0] + 1, counted[1] + took.Seconds()}
}

func (s *sender) run(ctx context.Context) {
	failures := 0
	for ctx.Err() == nil {
		select {
		case <-s.wake:
		case <-ctx.Done():
			return
		}
		sleep(ctx, linger)
		for taken := s.take(); len(taken) > 0 && ctx.Err() == nil; taken = s.take() {
			var left []pending
			for _, call := range calls(pack(taken)) {
				left = append(left, s.call(ctx, call)...)
			}
			if len(left) == 0 {
				failures = 0
				continue
			}
			s.mu.Lock()
			s.pending = append(left, s.pending...)
			s.mu.Unlock()
			failures++
			sleep(ctx, pause(failures))
		}
	}
}

func (s *sender) take() []pending {
	s.mu.Lock()
	defer s.mu.Unlock()
	taken := s.pending
	s.pending = nil
	if len(taken) > 0 && len(s.runTimes) > 0 && time.Since(s.runTimesAt) > runTimesWait {
		text, err := json.Marshal(notification("run_times", map[string]any{"actions": s.runTimes}))
		if err == nil {
			taken = append(taken, pending{text: string(text), sent: make(chan error, 1)})
		}
		s.runTimes, s.runTimesAt = map[string][2]float64{}, time.Now()
	}
	return taken
}

// call sends messages and returns the entries of those that were not accepted.
func (s *sender) call(ctx context.Context, messages [][]pending) (left []pending) {
	entries := make([]batchEntry, len(messages))
	for at, message := range messages {
		entries[at] = batchEntry{
			ID: strconv.Itoa(at), MessageBody: bodyOf(message),
			MessageAttributes: map[string]attribute{"worker": {"String", s.worker}},
		}
	}
	answer, err := s.queues.batch(ctx, "SendMessageBatch", s.url, entries)
	refused := map[string]string{} // reasons by id
	var failed *queueError
	if errors.As(err, &failed) && failed.isFinal() {
		if len(messages) > 1 { // one of them may be why
			for at := range messages {
				left = append(left, s.call(ctx, messages[at:at+1])...)
			}
			return left
		}
		refused["0"] = err.Error()
	}
	for _, one := range answer.Failed {
		if one.isFinal() {
			refused[one.ID] = one.Error()
		}
	}
	if err != nil {
		s.log("warning", "results_not_sent", map[string]any{"reason": err.Error()})
	} else if len(answer.Failed) > 0 {
		s.log("warning", "results_not_sent", map[string]any{"reason": answer.Failed[0].Message})
	}
	accepted := map[string]bool{}
	for _, one := range answer.Successful {
		accepted[one.ID] = true
	}
	for at, message := range messages {
		reason, isRefused := refused[strconv.Itoa(at)]
		switch size := len(message[0].text); {
		case err == nil && accepted[strconv.Itoa(at)]:
			for _, one := range message {
				one.sent <- nil
			}
		case isRefused && len(message) == 1 && size > smallestSize:
			message[0].sent <- &refusal{size, reason}
		default:
			for _, one := range message {
				one.isAlone = one.isAlone || isRefused
				left = append(left, one)
			}
		}
	}
	return left
}

func bodyOf(message []pending) string {
	if len(message) == 1 {
		return message[0].text
	}
	texts := make([]string, len(message))
	for at, one := range message {
		texts[at] = one.text
	}
	return "[" + strings.Join(texts, ",") + "]"
}

// pack returns entries by message.
func pack(entries []pending) (messages [][]pending) {
	bytes := packBytes
	for _, entry := range entries {
		size := len(entry.text) + 1
		if bytes+size > packBytes || entry.isAlone {
			messages = append(messages, nil)
			bytes = 2
		}
		last := len(messages) - 1
		messages[last] = append(messages[last], entry)
		bytes += size
		if entry.isAlone {
			bytes = packBytes
		}
	}
	return messages
}

// calls returns messages by call.
func calls(messages [][]pending) (found [][][]pending) {
	bytes := messageLimit
	for _, message := range messages {
		size := len(bodyOf(message)) + 200
		if bytes+size > messageLimit || len(found[len(found)-1]) == callEntries {
			found = append(found, nil)
			bytes = 0
		}
		last := len(found) - 1
		found[last] = append(found[last], message)
		bytes += size
	}
	return found
}

func notify(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// lease is a received message, and how many of its tasks are not answered. Its fields belong to leases.mu.
type lease struct {
	receipt  string
	received int
	open     int
	begun    bool
	isLost   bool
	until    time.Time
}

// leases extends the visibility timeout of messages in work, and deletes them when all of their tasks are answered.
type leases struct {
	queues  *queueClient
	url     string
	seconds int
	log     func(level, event string, fields map[string]any)

	mu   sync.Mutex
	all  map[*lease]bool
	done []*lease
	wake chan struct{}
}

func (l *leases) add(one *lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all[one] = true
}

// begin marks a message whose tasks run; false if it was released.
func (l *leases) begin(one *lease) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all[one] {
		one.begun = true
	}
	return l.all[one]
}

func (l *leases) isBegun(one *lease) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return one.begun
}

// holds is false once the visibility timeout has ended, whatever has extended it later.
func (l *leases) holds(one *lease) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	one.isLost = one.isLost || !time.Now().Before(one.until)
	return !one.isLost
}

// answered counts one more answered task of a message.
func (l *leases) answered(one *lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	one.open--
	if one.open == 0 && l.all[one] {
		l.done = append(l.done, one)
		notify(l.wake)
	}
}

// release lets others receive the messages that are chosen and not answered; returns their number.
func (l *leases) release(ctx context.Context, chosen func(*lease) bool) int {
	l.mu.Lock()
	var taken []*lease
	for one := range l.all {
		if one.open > 0 && chosen(one) {
			taken = append(taken, one)
			delete(l.all, one)
		}
	}
	l.mu.Unlock()
	l.extend(ctx, taken, 0)
	return len(taken)
}

// left is the number of messages that are not deleted yet.
func (l *leases) left() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.all)
}

func (l *leases) keep(ctx context.Context) {
	ticker := time.NewTicker(time.Duration(l.seconds) * time.Second / 3)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		l.mu.Lock()
		held := make([]*lease, 0, len(l.all))
		for one := range l.all {
			held = append(held, one)
		}
		l.mu.Unlock()
		l.extend(ctx, held, l.seconds)
	}
}

func (l *leases) extend(ctx context.Context, held []*lease, seconds int) {
	var calls sync.WaitGroup
	for _, batch := range batches(held) {
		calls.Add(1)
		go func(batch []*lease) {
			defer calls.Done()
			l.extendBatch(ctx, batch, seconds)
		}(batch)
	}
	calls.Wait()
}

func (l *leases) extendBatch(ctx context.Context, batch []*lease, seconds int) {
	entries := make([]batchEntry, len(batch))
	for at, one := range batch {
		entries[at] = batchEntry{ID: strconv.Itoa(at), ReceiptHandle: one.receipt, VisibilityTimeout: &seconds}
	}
	until := time.Now().Add(time.Duration(seconds) * time.Second)
	answer, err := l.queues.batch(ctx, "ChangeMessageVisibilityBatch", l.url, entries)
	if err != nil {
		l.log("warning", "leases_not_extended", map[string]any{"reason": err.Error()})
		return
	}
	if len(answer.Failed) > 0 {
		l.log("warning", "leases_not_extended", map[string]any{"reason": answer.Failed[0].Message})
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, one := range answer.Successful {
		if at, err := strconv.Atoi(one.ID); err == nil && at < len(batch) {
			batch[at].isLost = batch[at].isLost || !time.Now().Before(batch[at].until)
			batch[at].until = until
		}
	}
}

func (l *leases) deleteDone(ctx context.Context) {
	failures := 0
	for ctx.Err() == nil {
		select {
		case <-l.wake:
		case <-ctx.Done():
			return
		}
		sleep(ctx, linger)
		l.mu.Lock()
		taken := l.done
		l.done = nil
		l.mu.Unlock()
		var left []*lease
		for _, batch := range batches(taken) {
			left = append(left, l.deleteBatch(ctx, batch)...)
		}
		if len(left) == 0 {
			failures = 0
			continue
		}
		l.mu.Lock()
		l.done = append(l.done, left...)
		l.mu.Unlock()
		failures++
		sleep(ctx, pause(failures))
		notify(l.wake)
	}
}

func (l *leases) deleteBatch(ctx context.Context, batch []*lease) (left []*lease) {
	entries := make([]batchEntry, len(batch))
	for at, one := range batch {
		entries[at] = batchEntry{ID: strconv.Itoa(at), ReceiptHandle: one.receipt}
	}
	answer, err := l.queues.batch(ctx, "DeleteMessageBatch", l.url, entries)
	if err != nil {
		l.log("warning", "messages_not_deleted", map[string]any{"reason": err.Error()})
		return batch
	}
	again := map[string]bool{}
	for _, one := range answer.Failed {
		again[one.ID] = !one.SenderFault // another worker has the message if it is
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for at, one := range batch {
		if again[strconv.Itoa(at)] {
			left = append(left, one)
		} else {
			delete(l.all, one)
		}
	}
	return left
}

func batches(all []*lease) (found [][]*lease) {
	for len(all) > callEntries {
		found = append(found, all[:callEntries])
		all = all[callEntries:]
	}
	if len(all) > 0 {
		found = append(found, all)
	}
	return found
}

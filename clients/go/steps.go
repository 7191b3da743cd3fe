package penstock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	sleepStep     = "ctx.sleep"
	eventStep     = "ctx.event"
	stepNameChars = 200
)

// errStopped ends an attempt whose message is given back.
var errStopped = errors.New("the worker stops")

// stepEntry is a finished step, as requests carry it and as it is reported.
type stepEntry struct {
	Name       string          `json:"name"`
	Repetition int             `json:"repetition,omitempty"`
	Position   int             `json:"position,omitempty"`
	Parallel   bool            `json:"parallel,omitempty"`
	Result     json.RawMessage `json:"result,omitempty"`
	Error      json.RawMessage `json:"error,omitempty"`
}

func (e stepEntry) label() string {
	if e.Repetition > 0 {
		return fmt.Sprintf("%s#%d", e.Name, e.Repetition+1)
	}
	return e.Name
}

// replay reads the outcome of a finished step into result.
func (e stepEntry) replay(result any) error {
	if len(e.Error) > 0 {
		return stepError(e.label(), e.Error)
	}
	if len(e.Result) == 0 {
		return nil
	}
	if err := json.Unmarshal(e.Result, result); err != nil {
		return fmt.Errorf("the result of step %s in the journal: %w", e.label(), err)
	}
	return nil
}

// suspension ends an attempt whose task goes on later. Handlers return it as any other error.
type suspension struct {
	method string
	params map[string]any
	entry  *stepEntry
}

func (*suspension) Error() string { return "the task is suspended: return this error from the handler" }

// steps are the journal of a task, and the steps that an attempt asks for.
type steps struct {
	check       func(hasReported bool) error
	report      func(stepEntry) error
	resultLimit int // bytes
	limit       int // bytes of the journal
	most        int // steps of a task
	sealed      func(bytes int) int

	mu          sync.Mutex
	bytes       int         // of the journal, and of the steps of this attempt
	journal     []stepEntry // what the handler has not asked for
	repetitions map[string]int
	asked       int
	underWay    int
	reported    []stepEntry
	ended       error // a suspension or a lost lease, whatever the handler returns
}

// Step runs a durable step: once its report is in the results queue, no later attempt runs it again. Its result is what
// JSON keeps of it. An error that Fail made is final for the step, any other one fails the attempt.
func Step[R any](ctx context.Context, name string, run func(context.Context) (R, error)) (result R, err error) {
	s := TaskOf(ctx).steps
	if err := checkStepName(name); err != nil {
		return result, err
	}
	place, found, err := s.ask(name, false)
	if err != nil {
		return result, err
	}
	if found {
		err = place.replay(&result)
		return result, err
	}
	defer s.leave()
	value, err := run(ctx)
	err = s.finish(place, value, err, &result)
	return result, err
}

// checkStepName: the resulter refuses the report of any other step.
func checkStepName(name string) error {
	isName := name != "" && utf8.ValidString(name) && utf8.RuneCountInString(name) <= stepNameChars
	for _, char := range name {
		isName = isName && unicode.IsPrint(char)
	}
	if !isName {
		return fmt.Errorf("a step's name is 1 to %d printable characters, not %q", stepNameChars, cut(name, 100))
	}
	return nil
}

// Sleep suspends the task for so long. The handler must return its error, with which the attempt ends.
func Sleep(ctx context.Context, duration time.Duration) error {
	s := TaskOf(ctx).steps
	place, found, err := s.ask(sleepStep, true)
	if err != nil || found {
		return err
	}
	if duration < 0 { // as of time.Sleep
		duration = 0
	}
	place.Result = json.RawMessage("null")
	return s.end(&suspension{"suspend", map[string]any{"seconds": duration.Seconds()}, &place})
}

// Event suspends the task until task.complete or task.fail is called with this token, and returns the value that was
// given. timeout 0: PENSTOCK_WAIT_TIMEOUT_SECONDS. The handler must return its error.
func Event[R any](ctx context.Context, token string, timeout time.Duration) (result R, err error) {
	s := TaskOf(ctx).steps
	place, found, err := s.ask(eventStep, true)
	if err != nil {
		return result, err
	}
	if found {
		err = place.replay(&result)
		return result, err
	}
	at := map[string]any{"name": place.Name, "repetition": place.Repetition, "position": place.Position}
	params := map[string]any{"token": token, "step": at}
	if timeout > 0 {
		params["timeout"] = timeout.Seconds()
	}
	return result, s.end(&suspension{method: "wait", params: params})
}

// ask returns the journal's entry of a step, or its place for one that may begin.
func (s *steps) ask(name string, isAlone bool) (place stepEntry, found bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return place, false, s.ended
	}
	place = stepEntry{Name: name, Repetition: s.repetitions[name], Position: s.asked}
	for at, entry := range s.journal {
		if entry.Name == name && entry.Repetition == place.Repetition {
			s.journal = append(s.journal[:at:at], s.journal[at+1:]...)
			place, found = entry, true
			break
		}
	}
	s.repetitions[name]++
	s.asked++
	if found {
		return place, true, nil
	}
	if s.asked > s.most {
		s.ended = tooLarge("TooManySteps", "the task has more than %d durable steps, the limit of PENSTOCK_STEPS_LIMIT", s.most)
		return place, false, s.ended
	}
	if s.underWay == 0 {
		for _, next := range s.journal {
			if !next.Parallel {
				return place, false, changed("the handler asks for its step %s, but %s is next", place.label(), next.label())
			}
		}
	} else if isAlone {
		return place, false, fmt.Errorf("%s suspends the task while a step runs: wait for the step first", name)
	}
	if err := s.check(len(s.reported) > 0); err != nil {
		s.ended = err
		return place, false, err
	}
	if !isAlone {
		s.underWay++
	}
	return place, false, nil
}

// finish reports the outcome of a step that ran.
func (s *steps) finish(place stepEntry, value any, failed error, result any) error {
	var known *failure
	var outcome any = value
	if failed != nil {
		if !errors.As(failed, &known) || !known.isFinal() {
			return failed // the attempt fails, and the next one runs the step again
		}
		outcome = errorOf(failed, 0)
	}
	text, err := toText(outcome)
	if err != nil {
		return fmt.Errorf("the result of step %s: %w", place.label(), err)
	}
	if len(text) > s.resultLimit {
		return s.end(tooLarge("BadResult", "the result of step %s has %d bytes, PENSTOCK_RESULT_LIMIT_BYTES is %d",
			place.label(), len(text), s.resultLimit))
	}
	if place.Result = json.RawMessage(text); failed != nil {
		place.Result, place.Error = nil, place.Result
	}
	if err := s.add(&place); err != nil {
		return s.end(err)
	}
	if err := s.report(place); err != nil {
		s.forget(place)
		return s.end(err)
	}
	if err := s.check(true); err != nil {
		return s.end(err)
	}
	return place.replay(result)
}

// add puts a finished step beside those that this attempt has finished.
func (s *steps) add(place *stepEntry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	place.Parallel = s.underWay > 1 || s.asked != place.Position+1
	bytes := s.bytes + s.sealed(sizeOf(*place))
	if bytes > s.limit {
		return tooLarge("JournalTooLarge", "the results of the task's steps have %d bytes, PENSTOCK_STEPS_LIMIT_BYTES is %d",
			bytes, s.limit)
	}
	s.bytes = bytes
	s.reported = append(s.reported, *place)
	return nil
}

// forget leaves out a step whose report the queue refuses.
func (s *steps) forget(place stepEntry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at, one := range s.reported {
		if one.Position == place.Position {
			s.reported = append(s.reported[:at:at], s.reported[at+1:]...)
			return
		}
	}
}

func sizeOf(entries ...stepEntry) (bytes int) {
	for _, entry := range entries {
		text, _ := toText(entry) // it is JSON already
		bytes += len(text)
	}
	return bytes
}

func (s *steps) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.underWay--
}

func (s *steps) end(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = err
	return err
}

// entries are the steps that this attempt has finished.
func (s *steps) entries() []stepEntry {
	if s == nil { // the handler did not run
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]stepEntry(nil), s.reported...)
}

// outcome is how the attempt ends, by what its handler returned and the steps that it took.
func (s *steps) outcome(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return s.ended
	}
	if err == nil && len(s.journal) > 0 {
		return changed("the handler ended without its step %s", s.journal[0].label())
	}
	return err
}

func changed(format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	message := what + " in the journal of the task: the handler was changed while the task was under way"
	return &failure{kind: "StepChanged", message: message}
}

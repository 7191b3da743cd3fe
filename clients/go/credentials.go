package penstock

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"
)

const (
	refreshBefore   = 5 * time.Minute // of the end of temporary credentials
	credentialsWait = 5 * time.Second
	triesApart      = 30 * time.Second
	containerHost   = "http://169.254.170.2"
	instanceHost    = "http://169.254.169.254"
)

// credentials as containers and instances return them. Expiration is zero for those that stay.
type credentials struct {
	AccessKeyID     string `json:"AccessKeyId" xml:"AccessKeyId"`
	SecretAccessKey string `json:"SecretAccessKey" xml:"SecretAccessKey"`
	Token           string `json:"Token" xml:"SessionToken"`
	Expiration      time.Time
}

// provider finds credentials and keeps them until shortly before they end.
type provider struct {
	mu      sync.Mutex
	kept    credentials
	nextTry time.Time // after one that failed while the kept ones are valid
	getenv  func(string) string
	region  string
}

// get returns credentials of the first source that is configured: PENSTOCK_SQS_ACCESS_KEY, AWS_ACCESS_KEY_ID,
// a web identity, the endpoint of a container, the metadata of the instance.
func (p *provider) get(ctx context.Context) (credentials, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kept.AccessKeyID != "" && (p.kept.Expiration.IsZero() || time.Until(p.kept.Expiration) > refreshBefore) {
		return p.kept, nil
	}
	isValid := p.kept.AccessKeyID != "" && time.Now().Before(p.kept.Expiration)
	if isValid && time.Now().Before(p.nextTry) {
		return p.kept, nil
	}
	ctx, cancel := context.WithTimeout(ctx, credentialsWait)
	defer cancel()
	found, err := p.find(ctx)
	if err == nil && (found.AccessKeyID == "" || found.SecretAccessKey == "") {
		err = errors.New("the answer has no AccessKeyId or no SecretAccessKey")
	}
	if err != nil {
		if isValid {
			p.nextTry = time.Now().Add(triesApart)
			return p.kept, nil
		}
		return credentials{}, fmt.Errorf("no AWS credentials: %w; set AWS_ACCESS_KEY_ID, or give the task or instance a role", err)
	}
	p.kept = found
	return found, nil
}

func (p *provider) find(ctx context.Context) (credentials, error) {
	if id, secret, ok := strings.Cut(p.getenv("PENSTOCK_SQS_ACCESS_KEY"), ":"); ok {
		return credentials{AccessKeyID: id, SecretAccessKey: secret}, nil
	}
	if id := p.getenv("AWS_ACCESS_KEY_ID"); id != "" {
		return credentials{id, p.getenv("AWS_SECRET_ACCESS_KEY"), p.getenv("AWS_SESSION_TOKEN"), time.Time{}}, nil
	}
	if p.getenv("AWS_WEB_IDENTITY_TOKEN_FILE") != "" {
		return p.webIdentity(ctx)
	}
	address := p.getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
	if relative := p.getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"); relative != "" {
		address = containerHost + relative
	}
	if address != "" {
		return p.container(ctx, address)
	}
	if strings.EqualFold(p.getenv("AWS_EC2_METADATA_DISABLED"), "true") {
		return credentials{}, errors.New("none in the environment")
	}
	return p.instance(ctx)
}

// container asks the endpoint of ECS or of EKS Pod Identity.
func (p *provider) container(ctx context.Context, address string) (found credentials, err error) {
	token := p.getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN")
	if file := p.getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return found, err
		}
		token = strings.TrimSpace(string(text))
	}
	text, err := ask(ctx, http.MethodGet, address, map[string]string{"Authorization": token})
	if err != nil {
		return found, err
	}
	err = json.Unmarshal(text, &found)
	return found, err
}

// instance asks the metadata of an EC2 instance (IMDSv2).
func (p *provider) instance(ctx context.Context) (found credentials, err error) {
	host := p.getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT")
	if host == "" {
		host = instanceHost
	}
	base := strings.TrimSuffix(host, "/") + "/latest/"
	token, err := ask(ctx, http.MethodPut, base+"api/token", map[string]string{"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": "300"})
	if err != nil {
		return found, err
	}
	headers := map[string]string{"X-Aws-Ec2-Metadata-Token": string(token)}
	roles, err := ask(ctx, http.MethodGet, base+"meta-data/iam/security-credentials/", headers)
	if err != nil {
		return found, err
	}
	role, _, _ := strings.Cut(strings.TrimSpace(string(roles)), "\n")
	text, err := ask(ctx, http.MethodGet, base+"meta-data/iam/security-credentials/"+role, headers)
	if err != nil {
		return found, err
	}
	err = json.Unmarshal(text, &found)
	return found, err
}

// webIdentity assumes a role by the token of a service account of Kubernetes.
func (p *provider) webIdentity(ctx context.Context) (credentials, error) {
	token, err := os.ReadFile(p.getenv("AWS_WEB_IDENTITY_TOKEN_FILE"))
	if err != nil {
		return credentials{}, err
	}
	session := p.getenv("AWS_ROLE_SESSION_NAME")
	if session == "" {
		session = "penstock-worker"
	}
	endpoint := p.getenv("AWS_ENDPOINT_URL_STS")
	if endpoint == "" {
		endpoint = serviceURL("sts", p.region)
	}
	query := url.Values{
		"Action": {"AssumeRoleWithWebIdentity"}, "Version": {"2011-06-15"}, "RoleArn": {p.getenv("AWS_ROLE_ARN")},
		"RoleSessionName": {session}, "WebIdentityToken": {strings.TrimSpace(string(token))},
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, endpoint, strings.NewReader(query.Encode()))
	if err != nil {
		return credentials{}, err
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	text, err := read(request)
	if err != nil {
		return credentials{}, err
	}
	var answer struct {
		Found credentials `xml:"AssumeRoleWithWebIdentityResult>Credentials"`
	}
	err = xml.Unmarshal(text, &answer)
	return answer.Found, err
}

func ask(ctx context.Context, method, address string, headers map[string]string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, method, address, nil)
	if err != nil {
		return nil, err
	}
	for name, value := range headers {
		if value != "" {
			request.Header.Set(name, value)
		}
	}
	return read(request)
}

// read returns the body of an answer. Errors never have it: it may hold secrets.
func read(request *http.Request) ([]byte, error) {
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", request.URL.Host, answer.Status)
	}
	return io.ReadAll(io.LimitReader(answer.Body, 1<<20))
}

func serviceURL(service, region string) string {
	suffix := ""
	if strings.HasPrefix(region, "cn-") {
		suffix = ".cn"
	}
	return "https://" + service + "." + region + ".amazonaws.com" + suffix
}
